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
