"""The caching allocator's rules, one by one, and what they add up to over training steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.plan.memory.caching_allocator import Allocator, Event
from dstrain.units import KIB, MIB

BOTH = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a list of events, up to its end or to the allocation that failed."""

    reserved_bytes: int
    live_bytes: int
    out_of_memory: bool
    retries: int


def replay(
    events: Iterable[Event],
    *,
    expandable_segments: bool,
    capacity_bytes: int | None = None,
    resident_bytes: int = 0,
) -> Replayed:
    """Returns the memory for `events` on a GPU that leaves the allocator `capacity_bytes`, beside a resident block."""
    allocator = Allocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    resident: list[Event] = [("resident", resident_bytes)] if resident_bytes else []
    is_enough = allocator.feed(chain(resident, events))
    return Replayed(
        reserved_bytes=allocator.driver.peak_bytes,
        live_bytes=allocator.live_bytes,
        out_of_memory=not is_enough,
        retries=allocator.retries,
    )


def reserved_mib(*sizes: float, expandable: bool = False) -> float:
    """Returns the MiB that allocations of so many MiB reserve."""
    events = [(number, round(size * MIB)) for number, size in enumerate(sizes)]
    return replay(events, expandable_segments=expandable).reserved_bytes / MIB


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ((1,), 2),  # the small pool ends at 1 MiB
        ((1.5,), 20),
        ((9.9,), 20),
        ((10,), 10),
        ((11,), 12),
        ((4, 4, 4, 4, 4), 20),  # five share a segment
        ((4, 4, 4, 4, 4, 4), 40),
        ((0.5, 0.5, 0.5, 0.5), 2),
        ((0.5, 1.5), 22),  # the pools share nothing
    ],
)
def test_segments_are_of_2_mib_20_mib_or_the_request_in_multiples_of_2_mib(
    sizes: tuple[float, ...], reserved: float
) -> None:
    assert reserved_mib(*sizes) == reserved


@pytest.mark.parametrize(
    ("sizes", "reserved"), [((0.1,), 2), ((1.5,), 20), ((11,), 20), ((11, 11), 40), ((30, 8), 40), ((0.5, 1.5), 22)]
)
def test_expandable_segments_grow_by_pages_of_2_and_20_mib(sizes: tuple[float, ...], reserved: float) -> None:
    assert reserved_mib(*sizes, expandable=True) == reserved


@BOTH
def test_live_bytes_are_rounded_up_to_512(expandable: bool) -> None:
    assert replay([("a", 1), ("b", 513)], expandable_segments=expandable).live_bytes == 512 + 1024


def test_a_rest_of_1_mib_stays_with_its_large_block_and_counts_as_live() -> None:
    assert replay([("a", 11 * MIB)], expandable_segments=False).live_bytes == 12 * MIB
    assert replay([("a", 11 * MIB)], expandable_segments=True).live_bytes == 11 * MIB


def test_a_rest_of_512_bytes_of_a_small_block_is_split_off() -> None:
    fills = [(number, 1 * MIB - 512) for number in range(2)]
    assert replay([*fills, ("rest", 1 * KIB)], expandable_segments=False).reserved_bytes == 2 * MIB


@BOTH
def test_freed_neighbours_merge(expandable: bool) -> None:
    freed = [*[(n, 5 * MIB) for n in range(4)], *[(n, 0) for n in (1, 3, 0, 2)]]
    found = replay([*freed, ("whole", 20 * MIB)], expandable_segments=expandable)
    assert found.reserved_bytes == 20 * MIB


def test_the_smallest_block_that_holds_the_request_is_used() -> None:
    events: list[Event] = [("large", 40 * MIB), ("fitting", 14 * MIB), ("large", 0), ("fitting", 0)]
    # were the first 14 MiB cut from the 40, nothing would hold the last 40
    found = replay([*events, ("again", 14 * MIB), ("then", 40 * MIB)], expandable_segments=False)
    assert found.reserved_bytes == 54 * MIB


def interleaved() -> list[Event]:
    """Returns two large tensors around a middle one that outlives them, and then one as large as both."""
    return [("a", 30 * MIB), ("keeps", 12 * MIB), ("b", 30 * MIB), ("a", 0), ("b", 0), ("both", 60 * MIB)]


def test_two_free_segments_do_not_serve_one_request() -> None:
    assert replay(interleaved(), expandable_segments=False).reserved_bytes == (30 + 12 + 30 + 60) * MIB


def test_an_expandable_segment_grows_at_its_free_end() -> None:
    found = replay(interleaved(), expandable_segments=True)
    # 30 + 12 in front, 60 from there on: 102 MiB in pages of 20
    assert found.reserved_bytes == 120 * MIB


def test_adjacent_free_parts_of_an_expandable_segment_serve_one_request() -> None:
    events: list[Event] = [("a", 30 * MIB), ("b", 30 * MIB), ("a", 0), ("b", 0), ("both", 60 * MIB)]
    assert replay(events, expandable_segments=False).reserved_bytes == 120 * MIB
    assert replay(events, expandable_segments=True).reserved_bytes == 60 * MIB


def test_a_block_that_can_grow_is_the_last_choice_in_an_expandable_segment() -> None:
    # free: 50 MiB in the middle and 30 MiB at the end; 25 MiB go to the middle although the end fits better
    events: list[Event] = [("x", 50 * MIB), ("keeps", 10 * MIB), ("end", 30 * MIB), ("x", 0), ("end", 0)]
    found = replay([*events, ("y", 25 * MIB), ("z", 40 * MIB)], expandable_segments=True)
    assert found.reserved_bytes == 100 * MIB


def test_what_is_cached_goes_back_to_the_driver_before_memory_runs_out() -> None:
    events: list[Event] = [("a", 60 * MIB), ("a", 0), ("b", 80 * MIB)]
    found = replay(events, expandable_segments=False, capacity_bytes=100 * MIB)
    assert (found.out_of_memory, found.retries, found.reserved_bytes) == (False, 1, 80 * MIB)


def test_a_segment_that_is_partly_used_cannot_go_back() -> None:
    events: list[Event] = [("a", 40 * MIB), ("a", 0), ("keeps", 2 * MIB), ("b", 80 * MIB)]
    default = replay(events, expandable_segments=False, capacity_bytes=100 * MIB)
    assert (default.out_of_memory, default.retries) == (True, 1)
    expandable = replay(events, expandable_segments=True, capacity_bytes=100 * MIB)
    assert (expandable.out_of_memory, expandable.retries) == (False, 0)  # the free end grows


def test_free_pages_of_an_expandable_segment_serve_the_other_pool() -> None:
    events: list[Event] = [("large", 100 * MIB), ("large", 0), ("small", 1 * MIB)]
    found = replay(events, expandable_segments=True, capacity_bytes=100 * MIB)
    assert (found.out_of_memory, found.retries) == (False, 1)


def test_pages_that_went_back_can_be_taken_again() -> None:
    pressed: list[Event] = [("hole", 60 * MIB), ("keeps", 20 * MIB), ("hole", 0), ("small", 1 * MIB)]
    found = replay([*pressed, ("again", 40 * MIB)], expandable_segments=True, capacity_bytes=80 * MIB)
    assert (found.out_of_memory, found.retries, found.reserved_bytes) == (False, 1, 80 * MIB)
    # of 60 MiB the small pool's page has 2, so that all 60 are not to be had
    assert replay([*pressed, ("all", 60 * MIB)], expandable_segments=True, capacity_bytes=80 * MIB).out_of_memory


@BOTH
def test_out_of_memory_ends_the_replay_after_one_retry(expandable: bool) -> None:
    events: list[Event] = [("a", 60 * MIB), ("b", 60 * MIB), ("never", 1)]
    found = replay(events, expandable_segments=expandable, capacity_bytes=100 * MIB)
    assert (found.out_of_memory, found.retries, found.live_bytes) == (True, 1, 60 * MIB)


@BOTH
def test_resident_bytes_live_from_the_start(expandable: bool) -> None:
    found = replay([("a", 10 * MIB)], expandable_segments=expandable, resident_bytes=70 * MIB)
    assert (found.live_bytes, found.reserved_bytes) == (80 * MIB, 80 * MIB)


@BOTH
def test_an_empty_tensor_takes_nothing(expandable: bool) -> None:
    found = replay([("empty", 0), ("empty", 0)], expandable_segments=expandable)
    assert (found.live_bytes, found.reserved_bytes) == (0, 0)


def test_an_id_cannot_allocate_twice() -> None:
    with pytest.raises(ValueError, match="'a' allocates twice"):
        replay([("a", 1), ("a", 1)], expandable_segments=False)


SIZES = st.integers(1, 64 * MIB) | st.integers(1, 4 * KIB) | st.sampled_from([1 * MIB, 10 * MIB, 20 * MIB])


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Draws allocations and frees in an order that makes sense."""
    events: list[Event] = []
    held: list[int] = []
    choices = draw(st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 59)), min_size=1, max_size=60))
    for key, (size, is_free, which) in enumerate(choices):
        if held and is_free:
            events.append((held.pop(which % len(held)), 0))
        else:
            events.append((key, size))
            held.append(key)
    return events


@given(histories(), st.booleans(), st.none() | st.integers(20, 200))
def test_reserved_covers_what_lives_and_stays_below_capacity(
    events: list[Event], expandable: bool, capacity_mib: int | None
) -> None:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    found = replay(events, expandable_segments=expandable, capacity_bytes=capacity)
    assert found.live_bytes <= found.reserved_bytes
    assert capacity is None or found.reserved_bytes <= capacity
    assert found.reserved_bytes % (2 * MIB) == 0
    if capacity is None:
        held: dict[object, int] = {}
        live = most = 0
        for key, size, *_ in events:
            live += size - (held.pop(key) if not size else 0)
            held[key] = size
            most = max(most, live)
        assert most <= found.live_bytes
        assert (found.out_of_memory, found.retries) == (False, 0)


@BOTH
def test_what_one_stream_has_freed_serves_no_other(expandable: bool) -> None:
    first: list[Event] = [("a", 40 * MIB), ("a", 0)]
    again = replay([*first, ("b", 40 * MIB)], expandable_segments=expandable)
    elsewhere = replay([*first, ("b", 40 * MIB, 1)], expandable_segments=expandable)
    assert (again.reserved_bytes, elsewhere.reserved_bytes) == (40 * MIB, 80 * MIB)


def test_a_retry_takes_free_segments_of_every_stream() -> None:
    events: list[Event] = [("a", 40 * MIB, 1), ("a", 0), ("b", 60 * MIB)]
    found = replay(events, expandable_segments=False, capacity_bytes=80 * MIB)
    assert (found.out_of_memory, found.retries) == (False, 1)


@given(histories())
def test_without_pressure_a_capacity_changes_nothing(events: list[Event]) -> None:
    for expandable in (False, True):
        free = replay(events, expandable_segments=expandable)
        assert replay(events, expandable_segments=expandable, capacity_bytes=free.reserved_bytes) == free
