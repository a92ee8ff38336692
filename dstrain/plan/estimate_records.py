"""Records of estimates and plans: memory and speed of a configuration, the choice, its reasons, and differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.memory import Memory, shard_bytes
from dstrain.records import type_config
from dstrain.units import format_sizes


class Limit(StrEnum):
    """The main bottleneck of a step."""

    COMPUTE = "compute"
    MEMORY_BANDWIDTH = "memory bandwidth"
    LAUNCHES = "kernel launches"
    INTRA_LINK = "link inside the node"
    INTER_LINK = "link between nodes"
    CPU_OPTIMIZER = "CPU optimizer"
    PCIE = "PCIe"
    NVME = "NVMe"
    ALLOCATOR = "memory allocator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The predicted speed of a configuration."""

    step_s: float
    """Seconds of one optimizer step."""
    tokens_per_s_per_gpu: float
    """Tokens trained each second, divided by all GPUs."""
    mfu_ratio: float
    """Model FLOPs of that over the GPU's peak, 0…1."""
    limited_by: Limit
    """The main bottleneck of the step."""
    uncertainty_ratio: float
    """Half the width of the range that the true step time is in for 8 of 10 runs, over `step_s`."""
    parts_s: Mapping[str, float]
    """Seconds of a step by part; they sum to `step_s`."""
    hidden_s: Mapping[str, float]
    """Seconds of collectives and copies that computation hides, by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A configuration, what it needs, and whether it fits."""

    __pydantic_config__ = type_config

    configuration: Configuration
    """The estimated configuration."""
    memory: Memory
    """The memory it needs."""
    usable_bytes_per_gpu: int
    """GPU memory that a plan may fill."""
    usable_bytes_per_host: int
    """RAM of a node that a plan may fill."""
    fits_gpu: bool
    """Whether it fits the GPU."""
    fits_host: bool
    """Whether it fits the node's RAM."""
    speed: Speed | None
    """The predicted speed, or None if the GPU's speed is unknown."""
    flops_per_token: float
    """Model FLOPs of one trained token."""
    num_params: int
    """Parameters of the model."""
    num_active_params: int
    """Parameters that one token meets."""
    num_trainable_params: int
    """Parameters with gradients."""

    def saved_bytes(self, *, only_model: bool) -> int:
        """Returns the bytes of one checkpoint, or of the saved model in it alone (`save_only_model`)."""
        trainable, frozen = self.num_trainable_params, self.num_params - self.num_trainable_params
        shards = shard_bytes(self.configuration, trainable=trainable, frozen=frozen) if only_model else 0
        return self.memory.checkpoint_bytes - shards

    @property
    def fits(self) -> bool:
        """Whether it fits GPU and host."""
        return self.fits_gpu and self.fits_host

    @property
    def shortage(self) -> str:
        """The needed and the usable memory in words, if it does not fit."""
        if not self.fits_gpu:
            where = "per GPU" if self.memory.load.fits_gpu else "per GPU while the model is loaded"
            needed, usable = self.memory.needed_bytes_per_gpu, self.usable_bytes_per_gpu
        else:
            needed, usable, where = self.memory.host_bytes_per_node, self.usable_bytes_per_host, "of host RAM per node"
        sizes = format_sizes(needed, usable)
        return f"{sizes[0]} {where}, {sizes[1]} usable"


class Topic(StrEnum):
    """The subject of a reason; a choice has the name of its field in a configuration."""

    SPEED = "speed"
    """Time of a step and its limits."""
    ZERO_STAGE = "zero_stage"
    OFFLOAD = "offload"
    GRAD_CKPT = "grad_ckpt"
    MICRO_BATCH = "micro_batch"
    HPZ = "hpz"
    SIMPLER = "simpler"
    """Gain of a faster plan that was passed over."""
    AS_ASKED = "as_asked"
    """Gain of dstrain's own choice over the request."""
    MODEL_STATES = "model_states"
    """Trained parameters, and their states on each GPU."""
    PEAK = "peak"
    """The peak of GPU memory."""
    HOST_RAM = "host_ram"
    BATCH = "batch"
    """The arithmetic of the batch."""
    BUFFERS = "buffers"
    """The engine's buffers, before ZeRO-3."""
    ZERO3_BUFFERS = "zero3_buffers"
    """The engine's buffers, including ZeRO-3's."""
    FIRST_PLAN = "first_plan"
    """How a plan compares to the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One sentence on why a plan is as it is."""

    topic: Topic
    """The subject."""
    text: str
    """The sentence, with numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen configuration, with reasons."""

    __pydantic_config__ = type_config

    chosen: Estimate
    """The choice."""
    rejected: tuple[Estimate, ...]
    """Faster estimates that do not fit, in order of preference."""
    num_estimated: int
    """Configurations that were estimated."""
    global_batch: int
    """Samples of one optimizer step over all GPUs."""
    learning_rate: float
    """Suggested peak learning rate."""
    reasons: tuple[Reason, ...]
    """Why, in sentences with numbers."""
    notes: tuple[str, ...]
    """Assumptions, and advice before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The difference that an edit makes; additional needs are positive."""

    device_bytes_per_gpu: int
    """Additional GPU memory in bytes."""
    host_bytes_per_node: int
    """Bytes of RAM of a node more."""
    step_ratio: float | None
    """Time of a step more, as a share of the time before; None if no speed is known."""
    tokens_ratio: float | None
    """Tokens a second more, as a share of those before; differs from the step's where a step has other samples."""
    fits_before: bool
    """Whether it fitted."""
    fits: bool
    """Whether it fits now."""


def effect(before: Estimate, after: Estimate) -> Effect:
    """Returns the additional memory and time of `after` over `before`."""
    slower = faster = None
    if before.speed is not None and after.speed is not None:
        slower = after.speed.step_s / before.speed.step_s - 1
        faster = after.speed.tokens_per_s_per_gpu / before.speed.tokens_per_s_per_gpu - 1
    return Effect(
        device_bytes_per_gpu=after.memory.device_bytes_per_gpu - before.memory.device_bytes_per_gpu,
        host_bytes_per_node=after.memory.host_bytes_per_node - before.memory.host_bytes_per_node,
        step_ratio=slower,
        tokens_ratio=faster,
        fits_before=before.fits,
        fits=after.fits,
    )
