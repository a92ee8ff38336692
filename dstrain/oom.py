"""The record of a rank that ran out of GPU memory: `oom.json`, which ranks write and `dstrain run` explains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.records import type_config

SCHEMA = 1
"""Version of the file."""


class Phase(StrEnum):
    """What a rank did when an allocation failed."""

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
    """Tokens of each sample; empty where they were not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """What the GPU and PyTorch's allocator held when an allocation failed, in bytes."""

    requested_bytes: int
    """What could not be allocated."""
    allocated_bytes: int
    """Live tensors (torch's memory_allocated)."""
    reserved_bytes: int
    """What the allocator held after it had returned its cache (torch's memory_reserved)."""
    free_bytes: int
    """What the driver had left."""
    device_bytes: int
    """Memory of the GPU, or the share of it that PyTorch may use."""

    @property
    def limit_bytes(self) -> int:
        """What PyTorch could have held."""
        return self.reserved_bytes + self.free_bytes

    @property
    def needed_bytes(self) -> int:
        """The least that the allocator would have held after the allocation."""
        return self.reserved_bytes + self.requested_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Live blocks of one size."""

    size_bytes: int
    count: int


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
