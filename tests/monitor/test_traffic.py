"""What collectives cost in a window, from the numbers of every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dstrain.monitor.traffic import KINDS, NOTHING, Kind, Message, Traffic, communication

GATHERED = Message(kind=Kind.ALL_GATHER, num_bytes=8_000_000, ranks=(0, 1), seconds=0.010)


def traffic(*seconds: float, calls: int = 2) -> Traffic:
    messages = tuple(replace(GATHERED, seconds=one) for one in seconds)
    return replace(NOTHING, calls=(calls, 0, 0, 0, 0), messages=(messages, *((),) * (len(KINDS) - 1)))


def bus(own: Traffic, other: Traffic, *, planned_s: float | None = None) -> tuple[float | None, float | None]:
    rows = [own.numbers(), other.numbers()]
    found = communication(own, rows, steps=1, step_s=1.0, expected=lambda message: planned_s)
    return found.get("bus_bytes_per_s"), found.get("bus_share")


def test_the_time_of_the_bytes_is_that_of_the_rank_that_comes_last() -> None:
    assert bus(traffic(0.010), traffic(0.004))[0] == pytest.approx(8e6 / 2 / 0.004)


def test_an_all_reduce_passes_each_link_twice() -> None:
    assert replace(GATHERED, kind=Kind.ALL_REDUCE).moved_bytes == 2 * GATHERED.moved_bytes


def test_a_gather_that_nobody_waited_for_at_once_does_not_make_links_slow() -> None:
    own = traffic(0.004, 0.004, 0.5, 0.5)
    assert bus(own, own)[0] == pytest.approx(8e6 / 2 / 0.004)


def test_bandwidth_is_compared_with_what_the_links_need() -> None:
    assert bus(traffic(0.008), traffic(0.008), planned_s=0.002)[1] == pytest.approx(0.25)


@pytest.mark.parametrize("other", [traffic(0.004, calls=3), traffic(math.nan)])
def test_messages_without_a_common_order_or_an_end_have_no_bandwidth(other: Traffic) -> None:
    assert bus(traffic(0.010), other) == (None, None)


def test_a_single_rank_has_no_communication() -> None:
    assert communication(NOTHING, [NOTHING.numbers()], steps=1, step_s=1.0, expected=None) == {}
