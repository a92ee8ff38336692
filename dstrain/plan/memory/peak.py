"""The peak of live bytes of one rank: its instant, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Detail(IntEnum):
    """Fidelity of the memory estimate: without or with a replay of the allocator. USABLE stops that replay once it is
    known whether the configuration fits."""

    QUICK = 0
    USABLE = 1
    REPLAYED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Live bytes of one GPU at one instant, by part, without the workspaces of kernel libraries."""

    name: str
    """The instant: `loss backward`, `layer backward`, `optimizer step` …"""
    params: int = 0
    """Parameters of this rank's share."""
    grads: int = 0
    """Gradients."""
    optimizer: int = 0
    """Master copy and states."""
    buffers: int = 0
    """Buckets and temporaries of engine and optimizer."""
    gathered: int = 0
    """Parameters that are whole only for a while."""
    activations: int = 0
    """Saved tensors and those at work."""
    logits: int = 0
    """Logits and the copies of the loss."""
    apart: int = 0
    """Sum of the streams' own peaks minus this peak; 0 if unknown."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.params + self.grads + self.optimizer + self.buffers + self.gathered + self.activations + self.logits
