"""The user's request: given values are fixed, None is chosen by the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt, Le

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision, RopeType, Task
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import Lora, RopeScaling
from dstrain.plan.configuration import DEFAULTS, Configuration, changed, choices
from dstrain.records import require_in_range, type_config


class LrScaling(StrEnum):
    """How the learning rate follows the samples of a step."""

    LINEAR = "linear"
    SQRT = "sqrt"


@dataclass(frozen=True, slots=True)
class Unset:
    """Describes the effect of a field that a request does not set."""

    words: str = "chosen"


CHOSEN = Unset()
"""The planner chooses."""
Count = Annotated[int | None, Gt(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's request to the planner: its fields are options of the commands that plan.

    Keys of a job have their docstrings in `Job`, and their defaults where the planner does not choose them. Raises
    InvalidConfig if a number is out of range.
    """

    __pydantic_config__ = type_config

    method: Method = Method.FULL
    lora: Lora = field(default_factory=Lora)
    task: Task = Task.SFT
    seq_len: Annotated[Count, Unset(f"{DEFAULTS.batch.seq_len}, or the model's limit")] = None
    rope_scaling: Annotated[RopeScaling | RopeType | None, Unset("yarn if the model's makers document it")] = None
    global_batch: Annotated[Count, Unset("about 64")] = None
    """Samples of one optimizer step over all GPUs."""
    lr_scaling: Annotated[LrScaling | None, Unset("it stays")] = None
    """Let the learning rate follow the global batch."""
    micro_batch: Annotated[Count, CHOSEN] = None
    grad_accum: Annotated[Count, CHOSEN] = None
    zero_stage: Annotated[int | None, Ge(0), Le(3), CHOSEN] = None
    """ZeRO stage."""
    offload: Annotated[Offload | None, CHOSEN] = None
    """States to keep outside GPU memory."""
    offload_ratio: Annotated[float | None, Gt(0), Le(1), CHOSEN] = None
    """With ZeRO-3, the share of an offloaded optimizer that leaves the GPU; 1: all of it."""
    hpz: Annotated[Count, CHOSEN] = None
    """GPUs of a node that share a second copy of ZeRO-3's parameters; 1: no copy."""
    qwz: bool = False
    """Let ZeRO-3 gather parameters in 8 bits (ZeRO++), which rounds them."""
    grad_ckpt: Annotated[bool | None, CHOSEN] = None
    grad_ckpt_every_n_layers: Annotated[Count, CHOSEN] = None
    activation_offload: Annotated[bool | None, Unset("if states are offloaded")] = None
    tiled_mlp: Annotated[bool | None, Unset("chosen for long rows")] = None
    loss: Annotated[LossKernel | None, Unset("with the least memory: fused, chunked or full")] = None
    attn: Annotated[Attention | None, Unset("auto, planned as sdpa")] = None
    sp: Annotated[Count, CHOSEN] = None
    tp: Count = 1
    ep: Annotated[Count, CHOSEN] = None
    precision: Annotated[Precision | None, Unset("by the GPU")] = None
    packing: Annotated[bool | None, Unset("by the data, else not")] = None
    optimizer: Optimizer = Optimizer.ADAMW
    liger: bool = False
    torch_compile: bool = False
    router_loss: bool | None = None
    """Whether the loss that balances experts is computed; None: where the model's config.json asks for it."""
    image_patches: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require_in_range(self)

    @property
    def configuration(self) -> Configuration:
        """DeepSpeed's defaults with every choice that the request makes."""
        given = {name: getattr(self, name, None) for name in choices()}
        return changed(DEFAULTS, **{name: v for name, v in given.items() if v not in (None, Attention.AUTO)})

    @property
    def has_open_attention(self) -> bool:
        """Whether the attention was probed on the training machines."""
        return self.attn in (None, Attention.AUTO)

    def of_model(self, model: ModelFacts) -> Configuration:
        """Returns `configuration`, with what is open of the attention and the loss of routers.

        The attention is then the one that every machine has: sdpa, or else eager.
        """
        asked = self.configuration
        if self.router_loss is None and model.moe is not None and model.moe.asks_for_router_loss:
            asked = changed(asked, router_loss=True)
        return changed(asked, attn=Attention.EAGER) if self.has_open_attention and not model.has_sdpa else asked

    @property
    def is_one_configuration(self) -> bool:
        """Whether every choice is given, so that the answer is an estimate of that and of nothing else."""
        given = (self.zero_stage, self.micro_batch, self.grad_ckpt)
        is_offload_known = self.offload is not None or self.zero_stage == 0
        return is_offload_known and all(value is not None for value in given)


SPEED = tuple(name for name in Request.__dataclass_fields__ if name in choices() and choices()[name].is_speed)
"""Fields that change the speed of a step and not what it trains on, beyond rounding."""
