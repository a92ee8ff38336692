"""The engine's transient blocks on one list of events, from which live bytes and the allocator's events are taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from dstrain.plan.memory.layers.tape import BLOCK_BYTES, Key


class Part(IntEnum):
    """Purposes of the engine's bytes."""

    GRADS = 0
    BUFFERS = 1
    GATHERED = 2
    STATES = 3
    """Optimizer states that the first step allocates, which are counted as resident."""


Parts = tuple[int, ...]
"""Bytes of gradients, buffers and gathered parameters."""
Block = tuple[int, Part, int, int | None]
"""A block `(id, part, bytes, rank)`; no rank: each has one. It is also its allocation's event and, with negative bytes,
its free's."""


class Mark(NamedTuple):
    """A place among the events, at a moment of the tape."""

    key: Key
    """The moment."""
    place: int
    """Events before it."""


class Timeline:
    """Allocations and frees of all ranks that are played, in order of time. Ranks differ in little: most blocks are on
    each of them, and written once."""

    __slots__ = ("_count", "events")

    def __init__(self) -> None:
        self.events: list[Block] = []
        self._count = 0

    def add(self, part: Part, size: int, rank: int | None = None) -> Block:
        """Allocates a block on all ranks, or on one of them, and returns it."""
        block = (self._count, part, size, rank)
        self._count += 1
        if size:
            self.events.append(block)
        return block

    def remove(self, block: Block, rank: int | None = None) -> None:
        """Frees a block on all ranks that have it, or on one of them."""
        number, part, size, owner = block
        if size:
            self.events.append((number, part, -size, owner if rank is None else rank))

    def passing(self, part: Part, size: int, rank: int | None = None) -> None:
        """Allocates and frees at once."""
        self.remove(self.add(part, size, rank))


class Span(NamedTuple):
    """One rank's bytes between two places of the timeline."""

    before: Parts
    """At the first place."""
    high: Parts
    """At their peak."""


def spans(events: Sequence[Block], ends: Iterable[int], rank: int = 0, begin: Parts = (0, 0, 0)) -> list[Span]:
    """Returns the bytes of a rank in each span of the events up to these ends; of equal peaks the first one's.

    The last span is what is left at the end.
    """
    found: list[Span] = []
    parts, live, start = [*begin], sum(begin), 0
    resident = Part.STATES  # looked up once: there may be 100,000 events
    for end in ends:
        before = high = tuple(parts)
        most = live
        for _, part, size, owner in events[start:end]:
            if (owner is None or owner == rank) and part is not resident:
                parts[part] += size
                live += size
                if live > most:
                    most, high = live, tuple(parts)
        found.append(Span(before, high))
        start = end
    return [*found, Span(tuple(parts), tuple(parts))]


def rounded(size: int) -> int:
    """Returns the rounded size of an allocation."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
