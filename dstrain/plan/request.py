"""The user's request: given values are fixed, None is chosen by the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

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


@dataclass(frozen=True, slots=True)
class Option:
    """How `dstrain plan` asks for a field."""

    help: str
    """What the field is."""
    unset: str = "chosen"
    """What a request without it leads to."""
    range: tuple[int, ...] = ()
    """The least and perhaps the largest number."""
    choices: tuple[StrEnum, ...] = ()
    """The values that may be asked for, if not all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's request to the planner. Raises InvalidConfig if a number is out of range."""

    __pydantic_config__ = type_config

    method: Annotated[Method, Option("Trained parameters.")] = Method.FULL
    lora: Lora = field(default_factory=Lora)
    """The adapter, for LoRA and QLoRA."""
    task: Annotated[Task, Option("Training task.")] = Task.SFT
    seq_len: Annotated[int | None, Option("Longest sample in tokens.", unset="4096, or the model's limit")] = None
    rope_scaling: Annotated[
        RopeScaling | RopeType | None,
        Option("Positions beyond the model's length.", unset="yarn if the model's makers document it"),
    ] = None
    global_batch: Annotated[int | None, Option("Samples of one optimizer step over all GPUs.", unset="about 64")] = None
    lr_scaling: Annotated[
        LrScaling | None, Option("Let the learning rate follow the global batch.", unset="it stays")
    ] = None
    micro_batch: Annotated[int | None, Option("Samples (pairs) of one forward of one GPU.")] = None
    grad_accum: Annotated[int | None, Option("Micro-batches of one optimizer step.")] = None
    zero_stage: Annotated[int | None, Option("ZeRO stage.", range=(0, 3))] = None
    offload: Annotated[Offload | None, Option("States to keep outside GPU memory.")] = None
    grad_ckpt: Annotated[bool | None, Option("Recompute activations.")] = None
    grad_ckpt_every_n_layers: Annotated[
        int | None, Option("With checkpointing, recompute one layer of every N.", range=(1,))
    ] = None
    tiled_mlp: Annotated[
        bool | None, Option("Compute MLPs for a part of the tokens at a time.", unset="chosen for long rows")
    ] = None
    offload_ratio: Annotated[
        float | None, Option("With ZeRO-3, the share of an offloaded optimizer that leaves the GPU; 1: all of it.")
    ] = None
    hpz: Annotated[
        int | None, Option("GPUs of a node that share a second copy of ZeRO-3's parameters; 1: no copy.")
    ] = None
    qwz: Annotated[bool, Option("Let ZeRO-3 gather parameters in 8 bits (ZeRO++), which rounds them.")] = False
    precision: Annotated[Precision | None, Option("Dtype of forward and backward.", unset="by the GPU")] = None
    attn: Annotated[Attention | None, Option("Attention implementation.", unset="auto, planned as sdpa")] = None
    packing: Annotated[bool | None, Option("Let short samples share rows.", unset="by the data, else not")] = None
    optimizer: Annotated[
        Optimizer,
        Option("Optimizer.", choices=(Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADAMW_BF16, Optimizer.MUON)),
    ] = Optimizer.ADAMW
    sp: Annotated[int | None, Option("Ulysses sequence-parallel ranks.")] = None
    tp: Annotated[int | None, Option("AutoTP tensor-parallel ranks.")] = 1
    ep: Annotated[int | None, Option("AutoEP expert-parallel ranks.")] = None
    liger: Annotated[bool, Option("Run norms, rotary embedding and MLPs on Liger's Triton kernels.")] = False
    torch_compile: Annotated[
        bool, Option("Let torch.compile compile the layers; the plan does not count its gain.")
    ] = False
    loss: Annotated[
        LossKernel | None, Option("How the loss is computed.", unset="with the least memory: fused, chunked or full")
    ] = None
    router_loss: bool | None = None
    """Whether the loss that balances experts is computed; None: where the model's config.json asks for it."""
    activation_offload: Annotated[
        bool | None, Option("Offload checkpointed activations to host RAM.", unset="if states are offloaded")
    ] = None
    image_patches: Annotated[int, Option("Vision patches of the images and videos of a sample.")] = 0

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
