"""The closed choices that requests, plans and job files share."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Precision(StrEnum):
    """The dtype of the model's parameters in forward and backward."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one parameter."""
        return 4 if self is Precision.FP32 else 2


class Offload(StrEnum):
    """What leaves GPU memory: nothing, the optimizer to the CPU, that and the parameters, or both to NVMe."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMS = "params"
    NVME = "nvme"


class Attention(StrEnum):
    """The attention implementation, by Transformers' names."""

    FLASH_ATTENTION_2 = "flash_attention_2"
    SDPA = "sdpa"
    EAGER = "eager"


class Hub(StrEnum):
    """Where models and data sets that are not local come from."""

    HF = "hf"
    MODELSCOPE = "modelscope"


class DataFormat(StrEnum):
    """How one sample is written."""

    AUTO = "auto"
    ALPACA = "alpaca"
    MESSAGES = "messages"
    TEXT = "text"


class LossOn(StrEnum):
    """Which tokens count in the loss."""

    ANSWER = "answer"
    ALL = "all"


class Schedule(StrEnum):
    """How the learning rate goes, by Transformers' names: those that need no more than a job has."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"


class SinkName(StrEnum):
    """Where metrics go beside `metrics.jsonl`."""

    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class SwanLabMode(StrEnum):
    """Where SwanLab's data go."""

    ONLINE = "online"
    OFFLINE = "offline"
    LOCAL = "local"
    DISABLED = "disabled"
