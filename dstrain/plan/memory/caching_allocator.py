"""A model of PyTorch's CUDA caching allocator: the memory it reserves for a sequence of allocations and frees.

Counts fragmentation: a segment that one tensor keeps alive cannot serve a larger request, so that the driver is asked
for more although enough is free.

A request is served from the smallest free block that holds it; of equal blocks, from the one at the lowest address. If
none does, the driver gives a new segment: 2 MiB for requests up to 1 MiB (the small pool), 20 MiB for those below
10 MiB, else the request rounded up to 2 MiB. The rest of a block is split off if it is large enough, and a freed
block merges with free neighbours of its segment, never across segments.

With `expandable_segments:True` each pool is one long range of addresses that grows by pages of 2 MiB (small) or 20 MiB
(large), so that all free neighbours merge.

Source: torch 2.13.0 c10/core/AllocatorConfig.h for the sizes; c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch for
the rules: get_free_block, should_split, get_allocation_size, try_merge_blocks, find_expandable_block, map_block,
unmap_block, release_blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable

from dstrain.units import MIB

ROUND_BYTES = 512
"""Every block is a multiple of this. Source: torch 2.13.0 c10/core/AllocatorConfig.h: kMinBlockSize."""
SMALL_BYTES = 1 * MIB
"""Largest request of the small pool, and the largest rest of a large block that is not split off. Source: as above,
kSmallSize."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment, or page of an expandable one, of the small pool. Source: as above, kSmallBuffer."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment of requests below 10 MiB, or page of an expandable one. Source: as above, large_segment_size_."""
OWN_SEGMENT_BYTES = 10 * MIB
"""A request from this size on gets a segment of its own. Source: as above, kMinLargeAlloc."""
SEGMENT_ROUND_BYTES = 2 * MIB
"""Such a segment is rounded up to a multiple of this. Source: as above, kRoundLarge."""

_ADDRESS_BITS = 56
_UNLIMITED_BYTES = 2**48
"""Addresses of one expandable segment if no capacity is given: more than any GPU has memory."""


class Driver:
    """The GPU's memory: how much is taken, how much there is, and fresh addresses."""

    __slots__ = ("_capacity_bytes", "_most_bytes", "_next_address", "_taken_bytes", "peak_bytes")

    def __init__(self, capacity_bytes: int | None, most_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._most_bytes = capacity_bytes if most_bytes is None else most_bytes
        self._taken_bytes = 0
        self._next_address = 0
        self.peak_bytes = 0

    def take(self, count: int) -> bool:
        """Takes bytes and returns whether enough were free."""
        taken = self._taken_bytes + count
        if self._most_bytes is not None and taken > self._most_bytes:
            return False
        self._taken_bytes = taken
        self.peak_bytes = max(self.peak_bytes, taken)
        return True

    def forget_peak(self) -> None:
        """Restarts the tracking of the peak."""
        self.peak_bytes = self._taken_bytes

    def give_back(self, count: int) -> None:
        """Returns bytes to the GPU."""
        self._taken_bytes -= count

    def new_segment(self, pool: Pool, size: int) -> Block:
        """Returns a block at addresses that nobody has used, from a multiple of 20 MiB on."""
        block = Block(pool, self._next_address, size)
        self._next_address += _rounded(size, LARGE_SEGMENT_BYTES)
        return block

    def expandable_bytes(self, size: int, page: int) -> int:
        """Returns the addresses of an expandable segment: memory plus an eighth, plus the request."""
        room = _UNLIMITED_BYTES if self._capacity_bytes is None else self._capacity_bytes * 9 // 8
        return _rounded(max(room, size), page)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Block:
    """A range of addresses: allocated or free and, in an expandable segment, possibly unmapped."""

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(
        self,
        pool: Pool,
        address: int,
        size: int,
        before: Block | None = None,
        after: Block | None = None,
        is_mapped: bool = True,
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.before = before
        self.after = after
        self.is_free = True
        self.is_mapped = is_mapped

    def cut(self, size: int) -> Block:
        """Keeps the first `size` bytes, and returns a new block with the rest."""
        after = self.after
        rest = Block(self.pool, self.address + size, self.size - size, self, after, self.is_mapped)
        self.size = size
        self.after = rest
        if after is not None:
            after.before = rest
        return rest


class Pool:
    """Free blocks of one pool, ordered by size, then by address; and segments as cudaMalloc gives them."""

    def __init__(self, driver: Driver, *, is_small: bool) -> None:
        self.driver = driver
        self.is_small = is_small
        self.smallest_rest = ROUND_BYTES if is_small else SMALL_BYTES + 1
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}

    def allocate(self, size: int) -> Block | None:
        """Returns a block of `size` bytes, or a little more where splitting is not worth it; None without memory."""
        at = bisect_left(self._keys, size << _ADDRESS_BITS)
        if at < len(self._keys):
            block = self._blocks.pop(self._keys.pop(self.choose(at)))
        else:
            grown = self.grow(size)
            if grown is None:
                return None
            block = grown
        if block.size - size >= self.smallest_rest:
            self.add(block.cut(size))
        block.is_free = False
        return block

    def choose(self, at: int) -> int:
        """Returns the index of the free block to use if `at` is the smallest that is large enough."""
        return at

    def grow(self, size: int) -> Block | None:
        """Returns a new segment for a request, or None without memory."""
        if size < OWN_SEGMENT_BYTES:
            segment = SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES
        else:
            segment = _rounded(size, SEGMENT_ROUND_BYTES)
        return self.driver.new_segment(self, segment) if self.driver.take(segment) else None

    def free(self, block: Block) -> None:
        """Takes a block back and merges it with its free neighbours."""
        block.is_free = True
        self.merge(block)
        self.add(block)

    def merge(self, block: Block) -> None:
        """Merges a block outside all lists with its free neighbours."""
        before, after = block.before, block.after
        if before is not None and before.is_free and before.is_mapped is block.is_mapped:
            self.remove(before)
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free and after.is_mapped is block.is_mapped:
            self.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def add(self, block: Block) -> None:
        """Adds a block to the free ones."""
        key = block.size << _ADDRESS_BITS | block.address
        insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        """Removes a block from the free ones."""
        key = block.size << _ADDRESS_BITS | block.address
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]

    def free_blocks(self) -> list[Block]:
        """Returns the free blocks from the smallest on."""
        return [self._blocks[key] for key in self._keys]

    def release(self) -> None:
        """Returns every segment that is a single free block to the driver."""
        for block in self.free_blocks():
            if block.before is None and block.after is None:
                self.remove(block)
                self.driver.give_back(block.size)


class ExpandablePool(Pool):
    """Free blocks of one pool, and segments that grow page by page."""

    def __init__(self, driver: Driver, *, is_small: bool) -> None:
        super().__init__(driver, is_small=is_small)
        self.smallest_rest = ROUND_BYTES
        self.page = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self._unmapped: dict[int, Block] = {}

    def choose(self, at: int) -> int:
        """Returns the smallest block that is large enough, where a block counts with what it can still grow by."""
        after = self._blocks[self._keys[at]].after
        if after is None or after.is_mapped:  # it cannot grow, and no other is smaller
            return at
        while at + 1 < len(self._keys) and self._room(at + 1) < self._room(at):
            at += 1
        return at

    def _room(self, at: int) -> int:
        block = self._blocks[self._keys[at]]
        after = block.after
        return block.size if after is None or after.is_mapped else block.size + after.size

    def grow(self, size: int) -> Block | None:
        """Returns a block at the lowest address where free and unmapped neighbours are large enough together."""
        block = self._lowest(size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.after
            assert after is not None, "_lowest has seen enough room"
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        self.remove(block)
        return block

    def _lowest(self, size: int) -> Block:
        """Returns the first of such neighbours, in a new segment if none exist."""
        for address in sorted(self._unmapped):
            block = self._unmapped[address]
            if block.before is not None and block.before.is_free:
                block = block.before
            room, last = 0, block
            while room < size and last.is_free:
                room += last.size
                if last.after is None:
                    break
                last = last.after
            if room >= size:
                return block
        segment = self.driver.new_segment(self, self.driver.expandable_bytes(size, self.page))
        segment.is_mapped = False
        self._unmapped[segment.address] = segment
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Maps the first pages of an unmapped block, which becomes free; returns whether memory sufficed."""
        size = _rounded(size, self.page)
        if not self.driver.take(size):
            return False
        del self._unmapped[block.address]
        if size < block.size:
            rest = block.cut(size)
            self._unmapped[rest.address] = rest
        block.is_mapped = True
        self.merge(block)
        self.add(block)
        return True

    def remove(self, block: Block) -> None:
        """Removes a block from the free or the unmapped ones."""
        if block.is_mapped:
            Pool.remove(self, block)
        else:
            del self._unmapped[block.address]

    def release(self) -> None:
        """Returns every page inside a free block to the driver."""
        for block in self.free_blocks():
            first = _rounded(block.address, self.page)
            last = (block.address + block.size) // self.page * self.page
            if first >= last:
                continue
            self.remove(block)
            if last < block.address + block.size:
                self.add(block.cut(last - block.address))
            middle = block
            if first > block.address:
                middle = block.cut(first - block.address)
                self.add(block)
            middle.is_mapped = False
            self.merge(middle)
            self._unmapped[middle.address] = middle
            self.driver.give_back(last - first)


Event = tuple[Hashable, int] | tuple[Hashable, int, int]
"""An allocation `(id, bytes)` with bytes > 0, or the free `(id, 0)` of what that id holds (nothing, where a tensor is
empty). A third number names the stream that allocates, if it is not the main one."""


class Allocator:
    """All pools of one GPU: a small and a large one for each stream, since streams never share free blocks.

    It stops before it would take more than `most_bytes` from the driver, as if memory ran out.
    No CUDA graphs; `max_split_size_mb`, `roundup_power2_divisions` and `garbage_collection_threshold` are as they are
    unless set, which is off. A block that another stream has used too is to be freed when that stream has gone past it.
    Source: c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch: BlockComparatorSize orders by stream first;
    DeviceCachingAllocator::malloc, free.
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
        # looked up once: there may be 100,000 events
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
