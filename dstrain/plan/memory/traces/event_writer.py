"""Writes the sequence of a run's allocations and frees, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from dstrain.plan.memory.caching_allocator import Event

MAIN, UNSHARD, PRE_UNSHARD, REDUCE = range(4)
"""Streams: where the model computes, where FSDP and ZeRO-3 gather, where FSDP casts a shard first, where gradients are
reduced."""


class Script:
    """Writes events; an id is what `allocate` returns."""

    def __init__(self, first_id: int = -1) -> None:
        self.events: list[Event] = []
        self._next = first_id

    def allocate(self, size: float, stream: int = MAIN) -> int:
        """Allocates; ids are negative, those of a recording are not."""
        key, self._next = self._next, self._next - 1
        nbytes = round(size)
        if nbytes:
            self.events.append((key, nbytes, stream) if stream else (key, nbytes))
        return key

    def free(self, *keys: int) -> None:
        """Frees, in this order."""
        self.events += [(key, 0) for key in keys]

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        taken, self.events = self.events, []
        return taken

    def allocate_all(self, sizes: Iterable[float], stream: int = MAIN) -> list[int]:
        """Allocates each size in order."""
        return [self.allocate(size, stream) for size in sizes]
