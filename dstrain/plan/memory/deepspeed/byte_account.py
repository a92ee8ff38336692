"""Records the engine's transient allocations and frees, and tracks their peak between two marks."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from dstrain.plan.memory.layers.recording import Key
from dstrain.plan.memory.layers.tensor import BLOCK_BYTES


class Part(IntEnum):
    """Purposes of the engine's bytes."""

    GRADS = 0
    BUFFERS = 1
    GATHERED = 2


Parts = tuple[int, ...]
EngineEvent = tuple[int, Part, int]
"""An allocation `(id, part, bytes)`, which is the block itself or, with negative bytes, the free of that block."""


class Action(NamedTuple):
    """The engine's allocations and frees at one mark."""

    key: Key
    """The mark."""
    events: tuple[EngineEvent, ...]
    """Allocations and frees, in order."""
    high: Parts
    """Peak of live bytes until the next mark, by part."""
    after: Parts
    """Live bytes afterwards, by part."""


class ByteAccount:
    """Live bytes by part, and the allocations and frees since the last cut."""

    __slots__ = ("_count", "events", "high", "highest", "live", "parts")

    def __init__(self) -> None:
        self.live = self.high = self._count = 0
        self.parts = [0] * len(Part)
        self.highest: Parts = tuple(self.parts)
        self.events: list[EngineEvent] = []

    def add(self, part: Part, size: int) -> EngineEvent:
        """Allocates a block, and returns it."""
        block = (self._count, part, size)
        self._count += 1
        if size:
            self.events.append(block)
        self.live += size
        self.parts[part] += size
        if self.live > self.high:
            self.high, self.highest = self.live, tuple(self.parts)
        return block

    def remove(self, block: EngineEvent) -> None:
        """Frees a block."""
        number, part, size = block
        if size:
            self.events.append((number, part, -size))
        self.live -= size
        self.parts[part] -= size

    def passing(self, part: Part, size: int) -> None:
        """Allocates and frees at once."""
        self.remove(self.add(part, size))

    def cut(self, key: Key) -> Action:
        """Returns the allocations and frees since the last cut as a mark's."""
        action = Action(key, tuple(self.events), self.highest, tuple(self.parts))
        self.high, self.highest = self.live, action.after
        self.events.clear()
        return action


def rounded(size: int) -> int:
    """Returns the rounded size of an allocation."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
