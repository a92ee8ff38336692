"""Tracks the engine's transient bytes and their peak between two marks."""

from __future__ import annotations

from enum import IntEnum

BLOCK_BYTES = 512
"""Allocations are rounded up to this. Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize."""


class Part(IntEnum):
    """What the engine's bytes are for."""

    GRADS = 0
    BUFFERS = 1
    GATHERED = 2


Parts = tuple[int, ...]


class ByteAccount:
    """Live bytes by part."""

    __slots__ = ("high", "highest", "is_touched", "live", "parts")

    def __init__(self) -> None:
        self.live = self.high = 0
        self.parts = [0] * len(Part)
        self.highest: Parts = tuple(self.parts)
        self.is_touched = False
        """Whether anything has happened since the last cut."""

    def add(self, part: Part, size: int) -> None:
        """Allocates."""
        self.is_touched = True
        self.live += size
        self.parts[part] += size
        if self.live > self.high:
            self.high, self.highest = self.live, tuple(self.parts)

    def remove(self, part: Part, size: int) -> None:
        """Frees."""
        self.is_touched = True
        self.live -= size
        self.parts[part] -= size

    def passing(self, part: Part, size: int) -> None:
        """Allocates and frees at once."""
        self.add(part, size)
        self.remove(part, size)

    def cut(self) -> tuple[Parts, Parts]:
        """Returns the parts at the most since the last cut, and those that live now; looks for the most anew."""
        found = self.highest, tuple(self.parts)
        self.high, self.highest, self.is_touched = self.live, found[1], False
        return found


def rounded(size: int) -> int:
    """Returns what an allocation of so many bytes takes."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
