"""Enumerations shared by requests, plans and job files."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """Trained parameters: all, or an adapter."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Task(StrEnum):
    """Training task: conversations, texts, or preferences between answers."""

    SFT = "sft"
    PRETRAIN = "pretrain"
    DPO = "dpo"

    @property
    def rows(self) -> int:
        """Sequences of one sample."""
        return 2 if self is Task.DPO else 1


class DpoLoss(StrEnum):
    """The loss of a pair, by TRL's names. Sources: arXiv 2305.18290, 2305.10425, 2310.12036, 2403.00409."""

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"


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
    """States kept outside GPU memory: none, the optimizer or also the parameters on the CPU, or both on NVMe."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMS = "params"
    NVME = "nvme"

    @property
    def words(self) -> str:
        """The choice in words."""
        words = {Offload.OPTIMIZER: "optimizer", Offload.PARAMS: "optimizer and parameter", Offload.NVME: "NVMe"}
        return f"{words.get(self, 'no')} offload"


class Attention(StrEnum):
    """The attention implementation, by Transformers' names; `auto` is the best one that every node has."""

    AUTO = "auto"
    FLASH_ATTENTION_4 = "flash_attention_4"
    FLASH_ATTENTION_3 = "flash_attention_3"
    FLASH_ATTENTION_2 = "flash_attention_2"
    SDPA = "sdpa"
    EAGER = "eager"

    @property
    def is_flash(self) -> bool:
        """Whether it is FlashAttention in packages of its own; all versions keep the same tensors."""
        return self in (Attention.FLASH_ATTENTION_2, Attention.FLASH_ATTENTION_3, Attention.FLASH_ATTENTION_4)

    @property
    def planned(self) -> Attention:
        """The implementation whose tensors are planned and traced: for `auto` the one that every machine has."""
        if self.is_flash:
            return Attention.FLASH_ATTENTION_2
        return Attention.SDPA if self is Attention.AUTO else self


class RopeType(StrEnum):
    """How positions are stretched beyond a model's length; makers alone have factors of `longrope` and `llama3`."""

    YARN = "yarn"
    LINEAR = "linear"
    DYNAMIC = "dynamic"


class Optimizer(StrEnum):
    """The optimizer, whose states memory depends on; `lion` and `sgd` are planned for a ds_config.json that names them.

    DeepSpeed keeps all of `adamw_bf16` in bf16, and steps only matrices of layers by `muon`."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_BF16 = "adamw_bf16"
    LION = "lion"
    SGD = "sgd"
    MUON = "muon"


class LossKernel(StrEnum):
    """How the loss gets from hidden states to a number.

    All logits at once, and in fp32; in the training precision, with rows in fp32 a chunk at a time (DeepSpeed); fused
    into the head, whose gradients are made in the forward pass, a tile of tokens at a time (dstrain)."""

    FULL = "full"
    CHUNKED = "chunked"
    FUSED = "fused"


LOGITS_PER_TILE = 2**27
"""Logits of a tile of dstrain's fused loss: 256 MiB in bf16, 883 tokens of Qwen3. Fewer tokens make products slower."""


class CompileBackend(StrEnum):
    """Backend of torch.compile, by PyTorch's names: its own kernels, or the same operations as before."""

    INDUCTOR = "inductor"
    AOT_EAGER = "aot_eager"


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
    PREFERENCE = "preference"


class Column(StrEnum):
    """Columns of a data set that are read, by the names under which they are known."""

    MESSAGES = "messages"
    CONVERSATIONS = "conversations"
    INSTRUCTION = "instruction"
    INPUT = "input"
    OUTPUT = "output"
    PROMPT = "prompt"
    COMPLETION = "completion"
    QUERY = "query"
    RESPONSE = "response"
    QUESTION = "question"
    ANSWER = "answer"
    TEXT = "text"
    SYSTEM = "system"
    HISTORY = "history"
    TOOLS = "tools"
    FUNCTIONS = "functions"
    IMAGES = "images"
    VIDEOS = "videos"
    WEIGHT = "weight"
    CHOSEN = "chosen"
    REJECTED = "rejected"
    LABEL = "label"


class LossOn(StrEnum):
    """Which tokens count in the loss: of all answers, of the last answer, or all."""

    ANSWER = "answer"
    LAST = "last"
    ALL = "all"


class Thinking(StrEnum):
    """Which answers keep their thoughts: as is usual with the family, all, those after the last question, or none."""

    AUTO = "auto"
    ALL = "all"
    LAST = "last"
    OFF = "off"


class StoppingStrategy(StrEnum):
    """When an epoch of weighted data sets ends, by the names of `datasets.interleave_datasets`."""

    FIRST_EXHAUSTED = "first_exhausted"
    ALL_EXHAUSTED = "all_exhausted"


class OnLongSample(StrEnum):
    """Treatment of a sample longer than the sequence."""

    TRUNCATE = "truncate"
    DROP = "drop"


class OnBadRow(StrEnum):
    """Treatment of a row that cannot be used."""

    STOP = "stop"
    SKIP = "skip"


class Interval(StrEnum):
    """When the model is evaluated or saved, besides the end of the run."""

    STEPS = "steps"
    EPOCH = "epoch"


class Schedule(StrEnum):
    """How the learning rate goes, by Transformers' names."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


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


class OnOom(StrEnum):
    """Reaction of `run` if a rank runs out of GPU memory: report changes that fit, or make the fastest and restart."""

    TELL = "tell"
    ADAPT = "adapt"
