"""The user's request: given values are fixed, None is chosen by the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision, RopeType, Task
from dstrain.errors import InvalidConfig
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import Lora, RopeScaling
from dstrain.plan.configuration import DEFAULTS, DEGREES, Configuration, changed, choices
from dstrain.records import type_config


class LrScaling(StrEnum):
    """How the learning rate follows the samples of a step."""

    LINEAR = "linear"
    SQRT = "sqrt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's request to the planner. Raises InvalidConfig if a number is out of range."""

    __pydantic_config__ = type_config

    method: Method = Method.FULL
    """Trained parameters: all, or an adapter."""
    lora: Lora = field(default_factory=Lora)
    """The adapter, for LoRA and QLoRA."""
    task: Task = Task.SFT
    """Training task."""
    seq_len: int | None = None
    """Longest sample in tokens."""
    rope_scaling: RopeScaling | RopeType | None = None
    """How positions are stretched; of a type alone, the factor is chosen."""
    global_batch: int | None = None
    """Samples of one optimizer step over all GPUs."""
    lr_scaling: LrScaling | None = None
    """How the learning rate follows the global batch; None: it does not."""
    micro_batch: int | None = None
    """Samples of one forward of one GPU."""
    grad_accum: int | None = None
    """Micro-batches of one optimizer step."""
    zero_stage: int | None = None
    """ZeRO stage, 0…3."""
    offload: Offload | None = None
    """States kept outside GPU memory."""
    grad_ckpt: bool | None = None
    """Whether activations are recomputed."""
    grad_ckpt_every_n_layers: int | None = None
    """Of how many layers one is recomputed; None: chosen."""
    tiled_mlp: bool | None = None
    """Whether MLPs are computed for a part of the tokens at a time; None: chosen."""
    offload_ratio: float | None = None
    """Share of an offloaded optimizer that leaves the GPU (Twin-Flow), above 0 to 1; None: chosen."""
    hpz: int | None = None
    """GPUs of a node that share a second copy of ZeRO-3's parameters (ZeRO++); 1: no copy; None: chosen."""
    qwz: bool = False
    """Whether ZeRO-3 gathers parameters in 8 bits (ZeRO++)."""
    precision: Precision | None = None
    """Dtype of forward and backward."""
    attn: Attention | None = None
    """Attention implementation; None and `auto`: planned as the slowest one that `auto` may come to."""
    packing: bool | None = None
    """Whether samples share rows, which need no padding mask; None: by the data, and without data they do not."""
    optimizer: Optimizer = Optimizer.ADAMW
    sp: int | None = None
    """Ulysses sequence-parallel ranks; None: chosen."""
    tp: int | None = 1
    """AutoTP tensor-parallel ranks; None: chosen."""
    ep: int | None = None
    """AutoEP expert-parallel ranks; None: chosen."""
    liger: bool = False
    """Whether Liger's kernels are used."""
    torch_compile: bool = False
    """Whether torch.compile compiles the decoder layers; never chosen."""
    loss: LossKernel | None = None
    """How the loss is computed; None: with the least memory."""
    router_loss: bool | None = None
    """Whether the loss that balances experts is computed; None: where the model's config.json asks for it."""
    activation_offload: bool | None = None
    """Whether checkpointed layer inputs wait in host RAM; None: chosen."""
    image_patches: int = 0
    """Patches of all images of one sample."""

    def __post_init__(self) -> None:
        counts = ("seq_len", "global_batch", "micro_batch", "grad_accum", "grad_ckpt_every_n_layers", "hpz", *DEGREES)
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                option = "--" + name.replace("_", "-")
                raise InvalidConfig(f"{option} is {value}", hint=f"Write {option} with a number of 1 or more.")
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            raise InvalidConfig(f"--zero-stage is {self.zero_stage}", hint="ZeRO has the stages 0, 1, 2 and 3.")
        if self.offload_ratio is not None and not 0 < self.offload_ratio <= 1:
            raise InvalidConfig(f"--offload-ratio is {self.offload_ratio:g}", hint="Write a share above 0, up to 1.")
        if self.image_patches < 0:
            raise InvalidConfig(f"--image-patches is {self.image_patches}", hint="Write 0 or more.")

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
