"""PyTorch's CUDA caching allocator in arithmetic: what an order of allocations and frees makes it reserve.

Fragmentation is what this counts: a segment that one tensor keeps alive cannot serve a larger request, so that the
driver is asked for more although enough is free. `pools` has the rules and their source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import chain

from dstrain.plan.pools import ROUND_BYTES, SMALL_BYTES, Block, Driver, ExpandablePool, Pool

Event = tuple[Hashable, int]
"""An allocation `(id, bytes)` with bytes > 0, or the free `(id, 0)` of what that id holds (nothing, where a tensor is
empty)."""

_RESIDENT = object()
"""The id of what lives from the beginning to the end, equal to nobody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the allocator did with a list of events, up to its end or to the allocation that failed."""

    reserved_bytes: int
    """Largest number of bytes taken from the driver: torch's max_memory_reserved."""
    live_bytes: int
    """Largest number of bytes in blocks that were handed out: torch's max_memory_allocated."""
    fragmentation_ratio: float
    """Reserved over live, less one."""
    out_of_memory: bool
    """Whether an allocation failed, even after everything cached had gone back to the driver."""
    retries: int
    """How often everything cached went back to the driver: torch's num_alloc_retries."""


class _Allocator:
    """Both pools of one GPU and one stream."""

    def __init__(self, *, expandable_segments: bool, capacity_bytes: int | None) -> None:
        kind = ExpandablePool if expandable_segments else Pool
        self.driver = Driver(capacity_bytes)
        self._large = kind(self.driver, is_small=False)
        self._small = kind(self.driver, is_small=True)
        self.retries = 0

    def allocate(self, nbytes: int) -> Block | None:
        """Returns a block of `nbytes` or more, or None when there is no memory for it.

        When the driver has nothing left, whole free segments go back to it and the request is tried once more.
        """
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.allocate(size)
        if block is None:
            self._large.release()
            self._small.release()
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
    """Returns what the allocator reserves for `events` on a GPU that leaves it `capacity_bytes` (None: any amount).

    `resident_bytes` live from before the first event to the end, as one block. An id may be any hashable value and may
    be used again once it was freed, so a step that frees what it allocates can be repeated as it is. Raises ValueError
    where one that holds something allocates again.

    One stream and no CUDA graphs; `max_split_size_mb`, `roundup_power2_divisions` and `garbage_collection_threshold`
    are as they are unless set, which is off.
    Source: c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch: DeviceCachingAllocator::malloc, free.

    >>> replay([("a", 11 * 2**20), ("b", 2**20 + 1)], expandable_segments=False).reserved_bytes // 2**20
    32
    """
    allocator = _Allocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    held: dict[Hashable, Block] = {}
    live = peak = 0
    failed = False
    for key, nbytes in chain([(_RESIDENT, resident_bytes)] if resident_bytes else [], events):
        if not nbytes:
            if key in held:
                block = held.pop(key)
                live -= block.size
                block.pool.free(block)
            continue
        if key in held:
            raise ValueError(f"{key!r} allocates twice without a free")
        found = allocator.allocate(nbytes)
        if found is None:
            failed = True
            break
        held[key] = found
        live += found.size
        if live > peak:
            peak = live
    reserved = allocator.driver.peak_bytes
    return Replayed(
        reserved_bytes=reserved,
        live_bytes=peak,
        fragmentation_ratio=reserved / peak - 1 if peak else 0.0,
        out_of_memory=failed,
        retries=allocator.retries,
    )
