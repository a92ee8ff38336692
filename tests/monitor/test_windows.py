"""Which windows of a run warm up, and do not count in its times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from dstrain.monitor.windows import START, counted, measurement, settled


def windows(times: Sequence[float], *, steps: int = 1, start: int = 0, tokens: float = 800.0) -> list[dict[str, Any]]:
    """Returns windows of so many steps with these seconds a step."""
    return [
        {START: start, "step": start + steps * n, "step_s": s, "tokens": steps * tokens, "tokens_per_s": tokens / s}
        for n, s in enumerate(times, 1)
    ]


H200_DEMO = (1.2533, 0.5552, 0.3012, 0.1811, 0.1211)
H200_1_7B = (3.5363, 3.7789, 2.4697, 1.9651, 2.0958, 2.1113, 2.0972)
COMPILED = (19.6048, 0.2419, 1.6078, 0.1083, 0.1109, 0.1161, 0.1037, 0.1005, 0.1109, 0.1003, 0.1148, 0.1058, 0.1025)
COMPILED_PACKED = (56.4819, 32.1701, 4.9629, 2.3689, 0.0938, 0.2177)
CPU = (0.1161, 0.1518, 0.1112, 0.1219, 0.1019, 0.1031, 0.1088, 0.1285, 0.1128, 0.1064, 0.1054, 0.112, 0.1055)
"""Recorded seconds of a step: windows of ten and of four steps on an H200, single steps on two CPU ranks."""


@pytest.mark.parametrize(
    ("times", "steps", "warm_up"),
    [
        (H200_DEMO, 10, 40),
        (H200_1_7B, 4, 12),
        (COMPILED, 1, 3),
        (COMPILED_PACKED, 1, 4),
        (CPU, 1, 2),
        ((2.0,) * 12 + (1.0,) * 8, 1, 12),
        ((1.0,) * 20, 1, 1),
    ],
)
def test_what_comes_before_the_speed_of_the_rest_does_not_count(
    times: tuple[float, ...], steps: int, warm_up: int
) -> None:
    found = settled(windows(times, steps=steps))
    assert (found.warm_up_steps, len(found.windows)) == (warm_up, len(times) - warm_up // steps)
    assert f"{warm_up} step" in found.note


def test_a_run_that_becomes_slower_or_is_disturbed_once_counts_whole() -> None:
    slower = settled(windows((9.0, *(1.0,) * 10, *(2.0,) * 20)))
    disturbed = settled(windows((9.0, *(1.0,) * 10, 5.0, *(1.0,) * 10)))
    assert (slower.warm_up_steps, disturbed.warm_up_steps) == (1, 1)


def test_after_a_hundred_steps_nothing_warms_up() -> None:
    assert settled(windows((2.0,) * 200 + (1.0,) * 99)).warm_up_steps == 100


def test_each_start_warms_up_on_its_own() -> None:
    found = settled([*windows(H200_1_7B, steps=4), *windows(H200_1_7B, steps=4, start=28)])
    assert found.warm_up_steps == 24
    assert [window["step"] for window in found.windows] == [16, 20, 24, 28, 44, 48, 52, 56]


def test_a_longer_batch_is_no_warm_up() -> None:
    lines = windows((9.0, 2.0, 2.0, *(1.0,) * 9))
    for line in lines[1:3]:
        line["tokens_per_s"] *= 2
    assert settled(lines).warm_up_steps == 1


def test_a_run_of_one_window_has_no_other_figures_and_leaves_out_none() -> None:
    one = windows((1.0,))
    assert (counted(one).windows, counted(one).note) == (tuple(one), "")
    assert (measurement(one).windows, measurement(one).step_s) == (0, None)


def test_a_measurement_has_the_speed_of_settled_steps_and_the_memory_of_all() -> None:
    lines = windows(H200_DEMO, steps=10)
    for line, peak in zip(lines, (5, 9, 7, 7, 7), strict=True):
        line |= {"peak_bytes_by_rank": [peak], "data_wait_s_by_rank": [0.0]}
    found = measurement(lines)
    assert found.step_s is not None
    assert math.isclose(found.step_s, 0.1211)
    assert (found.windows, found.steps, found.warm_up_steps, found.ranks[0].peak_bytes) == (1, 10, 40, 9)
