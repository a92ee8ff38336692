"""The record of a rank that ran out of GPU memory: `oom.json`, which ranks write, `dstrain run` completes, and
`dstrain report` shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dstrain.records import type_config
from dstrain.units import format_bytes

SCHEMA = 1
"""Version of the file."""


class Phase(StrEnum):
    """Activity of a rank when an allocation failed."""

    LOAD = "load"
    """Before the first step: loading the model, setting up the engine, trying the loss."""
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    EVALUATION = "evaluation"
    SAVE = "save"
    """Writing a checkpoint or the final model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The micro-batch that a rank worked on."""

    rows: int
    """Rows of the micro-batch."""
    tokens_per_row: int
    """Tokens of a row, padding included."""
    samples: tuple[int, ...]
    """Tokens of each sample; empty if they were not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Memory of the GPU and PyTorch's allocator when an allocation failed, in bytes."""

    requested_bytes: int
    """Size of the failed allocation."""
    allocated_bytes: int
    """Live tensors (torch's memory_allocated)."""
    reserved_bytes: int
    """Memory of the allocator after it had returned its cache (torch's memory_reserved)."""
    free_bytes: int
    """Memory that the driver had left."""
    device_bytes: int
    """Memory of the GPU, or the share of it that PyTorch may use."""

    @property
    def limit_bytes(self) -> int:
        """Memory that PyTorch could have held."""
        return self.reserved_bytes + self.free_bytes

    @property
    def needed_bytes(self) -> int:
        """The least that the allocator would have held after the allocation."""
        return self.reserved_bytes + self.requested_bytes

    @property
    def words(self) -> str:
        """Requested, held and free memory."""
        return (
            f"{format_bytes(self.requested_bytes)} requested; PyTorch held {format_bytes(self.reserved_bytes)},"
            f" {format_bytes(self.allocated_bytes)} of it in tensors; {format_bytes(self.free_bytes)} of"
            f" {format_bytes(self.device_bytes)} were free"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Live blocks of one size."""

    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensors:
    """Live tensors of one size that one module allocates, in all layers together."""

    name: str
    """The module and its pass: `mlp.gate_proj`, `after mlp.down_proj, recomputed`, `loss, backward` …; `after` names
    the linear layer that ran before."""
    size_bytes: int
    """Bytes of one tensor."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes of model states on the rank, counted after the allocation had failed (`train.memory`)."""

    params: int
    """Parameters on the GPU: the rank's own, and those that ZeRO-3 holds whole."""
    grads: int
    """Gradients on the GPU outside of the engine's buckets."""
    optimizer: int
    """Master weights and states of the optimizer on the GPU; without states before its first step."""
    host: int
    """All of these that are offloaded to RAM."""


class Part(StrEnum):
    """Parts of a GPU's memory that are both predicted and measured."""

    PARAMS = "parameters"
    """Those that ZeRO-3 holds whole among them."""
    GRADS = "gradients"
    OPTIMIZER = "optimizer states"
    OTHER = "activations, logits, buffers"
    """All other tensors."""
    CACHED = "cached by PyTorch"
    """Held by the allocator, and in no tensor."""
    OUTSIDE = "outside of PyTorch"
    """CUDA's context, NCCL, and other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBytes:
    """One part as it is predicted for the peak, and as it was when the allocation failed."""

    part: Part
    predicted_bytes: int
    measured_bytes: int | None
    """None if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Planned memory of a GPU."""

    device_bytes_per_gpu: int
    live_bytes_per_gpu: int
    reserved_bytes_per_gpu: int
    peak_instant: str
    """The instant of the peak."""
    parts: Mapping[str, int]
    """Bytes of each part of the peak (`plan.memory.memory.Breakdown`)."""
    largest: tuple[NamedTensors, ...] = ()
    """The largest tensors of the micro-batch at the peak. Empty if the peak is in the optimizer step, or if the plan
    does not know the model's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedChange:
    """A change that fits, as it is typed."""

    change: str
    """The change in words."""
    set: tuple[str, ...]
    """For `--set`: `key=value` of the job."""
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of ds_config.json with their values."""
    device_bytes_per_gpu: int | None = None
    """Predicted memory of a GPU, the measured excess included; None if it was not planned."""
    step_ratio: float | None = None
    """How much longer a step takes, as a share; None if that is unknown."""
    keeps_batch: bool = True
    """Whether a step has the same tokens as before."""

    @property
    def keys(self) -> str:
        """The keys of ds_config.json with their values; empty if none changes."""
        return ", ".join(f"{key}: {json.dumps(value)}" for key, value in self.ds_config.items())

    @property
    def settings(self) -> str:
        """The keys of job and ds_config.json that change, with their values."""
        return ", ".join([*self.set, *([self.keys] if self.ds_config else [])])

    def typed(self, *, resumes: bool, command: str = "dstrain run") -> str:
        """Returns the command that continues from the newest checkpoint, if one exists; `command` starts the run."""
        sets = [*self.set, *(["resume=auto"] if resumes else [])]
        command = " ".join([command, *(f"--set {item}" for item in sets)])
        return f"in ds_config.json {self.keys}; then {command}" if self.ds_config else command

    @property
    def price(self) -> str:
        """Its cost, in words."""
        parts = []
        if self.device_bytes_per_gpu is not None:
            parts.append(f"{format_bytes(self.device_bytes_per_gpu)} per GPU")
        if self.step_ratio is not None:
            percent = f"{100 * abs(self.step_ratio):.0f}"
            longer = "longer" if self.step_ratio > 0 else "less"
            parts.append("as fast" if percent == "0" else f"a step takes {percent} % {longer}")
        if not self.keeps_batch:
            parts.append("samples are cut")
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The change with its price."""
        return f"{self.change}: {self.price}" if self.price else self.change


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A failed allocation of one rank."""

    __pydantic_config__ = type_config

    schema: int = SCHEMA
    """Version of the file."""
    rank: int
    """The rank; of several that failed, the first one to write."""
    phase: Phase
    step: int
    """Optimizer steps done."""
    batch: Batch | None
    """None before the first micro-batch."""
    measured: Allocator | None
    """None if nobody counts what this device holds."""
    largest: tuple[Blocks, ...] = ()
    """The largest live blocks, where PyTorch's snapshot exists."""
    states: ModelStates | None = None
    """None before the engine is set up, or if its structure is unknown."""
    predicted: Predicted | None = None
    """None until `dstrain run` has completed the record, and if there is no plan."""
    ledger: tuple[PartBytes, ...] = ()
    """The plan's parts beside the measured ones; empty if one side is missing."""
    fixes: tuple[ProposedChange, ...] = ()
    """Changes that fit, the fastest first."""

    @property
    def where(self) -> str:
        """The rank, the phase and the micro-batch in words."""
        place = {
            Phase.LOAD: "while model and optimizer were set up",
            Phase.SAVE: f"saving after step {self.step}",
            Phase.EVALUATION: f"evaluation after step {self.step}",
        }
        words = place.get(self.phase, f"{self.phase} of step {self.step + 1}")
        batch = self.batch
        if batch is None:
            return f"rank {self.rank}, {words}"
        samples = f", samples of {', '.join(f'{size:,}' for size in batch.samples[:8])}" if batch.samples else ""
        more = " …" if len(batch.samples) > 8 else ""
        shape = f"{batch.rows} × {batch.tokens_per_row:,} tokens"
        return f"rank {self.rank}, {words}; micro-batch of {shape}{samples}{more}"
