"""A model of PyTorch's CUDA caching allocator: the memory it reserves for a sequence of allocations and frees.

Fragmentation is what this counts: a segment that one tensor keeps alive cannot serve a larger request, so that the
driver is asked for more although enough is free. `block_pools` has the rules and their source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import chain

from dstrain.plan.memory.block_pools import ROUND_BYTES, SMALL_BYTES, Block, Driver, ExpandablePool, Pool

Event = tuple[Hashable, int] | tuple[Hashable, int, int]
"""An allocation `(id, bytes)` with bytes > 0, or the free `(id, 0)` of what that id holds (nothing, where a tensor is
empty). A third number names the stream that allocates, where it is not the main one."""

_RESIDENT = object()
"""The id of the resident block, which equals no other id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a list of events, up to its end or to the allocation that failed."""

    reserved_bytes: int
    """Largest number of bytes taken from the driver: torch's max_memory_reserved."""
    live_bytes: int
    """Largest number of bytes in blocks that were handed out: torch's max_memory_allocated."""
    out_of_memory: bool
    """Whether an allocation failed even after all cached segments were returned to the driver."""
    retries: int
    """How often all cached segments were returned to the driver: torch's num_alloc_retries."""


class Allocator:
    """All pools of one GPU: a small and a large one for each stream, since streams never share free blocks.

    It stops before it would take more than `most_bytes` from the driver, as if memory ran out.
    Source: c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch: BlockComparatorSize orders by stream first.
    """

    def __init__(self, *, expandable_segments: bool, capacity_bytes: int | None, most_bytes: int | None = None) -> None:
        self._kind = ExpandablePool if expandable_segments else Pool
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._blocks: dict[Hashable, Block] = {}
        self._live = 0
        self.driver = Driver(capacity_bytes, most_bytes)
        self._gives_up = most_bytes is not None
        self.retries = 0
        self.live_bytes = 0
        """Peak of allocated bytes so far."""

    def feed(self, events: Iterable[Event]) -> bool:
        """Plays events and returns whether memory sufficed for all of them.

        Raises ValueError if an id allocates twice without a free.
        """
        blocks, live = self._blocks, self._live
        for event in events:
            key, nbytes = event[0], event[1]
            if not nbytes:
                if key in blocks:
                    block = blocks.pop(key)
                    live -= block.size
                    block.pool.free(block)
                continue
            if key in blocks:
                raise ValueError(f"{key!r} allocates twice without a free")
            allocated = self._allocate(nbytes, event[2] if len(event) == 3 else 0)
            if allocated is None:
                return False
            blocks[key] = allocated
            live += allocated.size
            if live > self.live_bytes:
                self.live_bytes = live
        self._live = live
        return True

    def empty_cache(self) -> None:
        """Returns everything that is free, in whole segments or pages, to the driver."""
        for pool in self._pools.values():
            pool.release()

    def _allocate(self, nbytes: int, stream: int) -> Block | None:
        """Returns a block of at least `nbytes`, or None if memory does not suffice.

        When the driver has nothing left, whole free segments of every stream go back to it and the request is tried
        once more.
        """
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        is_small = size <= SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = self._kind(self.driver, is_small=is_small)
        block = pool.allocate(size)
        if block is None and not self._gives_up:
            self.empty_cache()
            self.retries += 1
            block = pool.allocate(size)
        return block


def replay(
    events: Iterable[Event],
    *,
    expandable_segments: bool,
    capacity_bytes: int | None = None,
    resident_bytes: int = 0,
) -> Replayed:
    """Returns the memory reserved for `events` on a GPU that leaves it `capacity_bytes` (None: any amount).

    `resident_bytes` live from before the first event to the end, as one block. An id may be any hashable value and may
    be used again once it was freed, so a step that frees what it allocates can be repeated as it is. Raises ValueError
    where one that holds something allocates again.

    No CUDA graphs; `max_split_size_mb`, `roundup_power2_divisions` and `garbage_collection_threshold` are as they are
    unless set, which is off. A block that another stream has used too is to be freed when that stream has gone past it.
    Source: c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch: DeviceCachingAllocator::malloc, free.

    >>> replay([("a", 11 * 2**20), ("b", 2**20 + 1)], expandable_segments=False).reserved_bytes // 2**20
    32
    """
    allocator = Allocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    resident: list[Event] = [(_RESIDENT, resident_bytes)] if resident_bytes else []
    is_enough = allocator.feed(chain(resident, events))
    return Replayed(
        reserved_bytes=allocator.driver.peak_bytes,
        live_bytes=allocator.live_bytes,
        out_of_memory=not is_enough,
        retries=allocator.retries,
    )
