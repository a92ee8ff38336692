"""The peak of live bytes of one rank: its instant, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Detail(IntEnum):
    """How memory is computed: in short, with a replay of the engine, or with one of the allocator too; USABLE ends it
    where it takes more than may be used, and omits it where less is sure to be enough."""

    QUICK = 0
    ENGINE = 1
    USABLE = 2
    REPLAYED = 3


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
    """Bytes by which the peaks of the streams together exceed this one, as far as that is known."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.params + self.grads + self.optimizer + self.buffers + self.gathered + self.activations + self.logits
