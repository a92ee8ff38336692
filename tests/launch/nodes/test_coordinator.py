"""Events that a run takes from its nodes, and hangs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.heartbeat import STARTING, Phase
from dstrain.launch.nodes.connection import LaunchSpec, Node, StopRequests
from dstrain.launch.nodes.coordinator import Coordinator, HangDetector
from dstrain.launch.nodes.protocol import Wrote
from dstrain.rundir import RunDir


@pytest.mark.parametrize("name", ["../out", "/tmp/dstrain-out", "start.sh", "logs/../../out.log"])
def test_a_node_that_writes_elsewhere_is_named_and_writes_nothing(tmp_path: Path, name: str) -> None:
    place = RunDir(tmp_path / "run")
    place.path.mkdir()
    node = Node(number=1, host="node1", is_here=False, command=("x",), first_rank=1, num_ranks=1)
    score = LaunchSpec(
        nodes=(node,), run_dir=place, mark="m", open=lambda nodes: [], environment={}, unset=(), exports={},
        master_port=29500,
    )  # fmt: skip
    coordinator, part = Coordinator(score, StopRequests(), lambda text: None), SimpleNamespace(node=node, problem=None)
    own: Any = coordinator
    own._members = SimpleNamespace(mirrored={1})
    own._take(part, Wrote(name="logs/1_rank1.log", text="words", on_screen=False), 0.0)
    own._take(part, Wrote(name=name, text="words", on_screen=False), 0.0)
    assert part.problem.text == f"sent {name!r}, which is not a file of a run"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["1_rank1.log"]


def stepping(*, seconds: float, steps: int = 10, ranks: int = 2, least_s: float = 60) -> HangDetector:
    pace = HangDetector(ranks, least_s)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            pace.note(rank, step, Phase.STEP, step * seconds)
    return pace


@pytest.mark.parametrize(("seconds", "limit"), [(20, 100), (0.1, 60)])
def test_five_times_the_median_is_a_hang_and_a_minute_for_short_steps(seconds: float, limit: float) -> None:
    pace = stepping(seconds=seconds)
    assert pace.stood_still_s(10 * seconds + limit - 1) is None
    assert pace.stood_still_s(10 * seconds + limit + 1) == limit + 1


def test_a_single_rank_that_stands_still_is_a_hang() -> None:
    pace = stepping(seconds=20)
    pace.note(0, 11, Phase.STEP, 220)
    assert pace.stood_still_s(310) == 110
    assert pace.steps == {0: 11, 1: 10}


def long_phase(pace: HangDetector, phase: Phase, begin: float, end: float) -> None:
    for rank in (0, 1):
        pace.note(rank, 10, phase, begin)
    for rank in (0, 1):
        pace.note(rank, 10, Phase.STEP, end)


HOUR = 3600.0
DEFAULTS = {"least_s": 60.0, "start_s": HOUR}


def in_phase(phase: Phase, *, at: float, steps: int = 10, **limits: float) -> HangDetector:
    """Both ranks do steps of 20 s, and then enter a phase."""
    pace = HangDetector(2, **(DEFAULTS | limits))  # type: ignore[arg-type]
    pace.begin(0)
    for step in range(1, steps + 1):
        for rank in (0, 1):
            pace.note(rank, step, Phase.STEP, 20 * step)
    for rank in (0, 1):
        pace.note(rank, steps, phase, at)
    return pace


NOT_STARTING = [phase for phase in Phase if phase not in STARTING]


@pytest.mark.parametrize("phase", NOT_STARTING)
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_no_phase_after_the_start_is_without_a_limit_and_none_is_short(phase: Phase, steps: int) -> None:
    pace = in_phase(phase, at=20 * steps, steps=steps)
    limit = 100 if phase is Phase.STEP and steps > 3 else HOUR
    assert pace.stood_still_s(20 * steps + limit - 1) is None
    assert pace.stood_still_s(20 * steps + limit + 1) == limit + 1


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_first_steps_have_the_limit_of_the_start(steps: int) -> None:
    pace = in_phase(Phase.STEP, at=20 * steps, steps=steps, least_s=10, start_s=30)
    limit = 30 if steps == 1 else 100
    assert pace.stood_still_s(20 * steps + limit) is None
    assert pace.stood_still_s(20 * steps + limit + 1) == limit + 1


def test_a_first_checkpoint_may_take_as_long_as_a_slow_disk_needs() -> None:
    pace = in_phase(Phase.SAVING, at=201, saved_bytes=400 * 10**9)
    assert pace.stood_still_s(201 + 20_000) is None
    assert pace.stood_still_s(201 + 20_001) == 20_001
    assert in_phase(Phase.BUSY, at=201, saved_bytes=400 * 10**9).stood_still_s(20_000) is None


def test_an_evaluation_that_goes_on_may_take_any_time_and_is_no_step() -> None:
    pace = in_phase(Phase.EVALUATING, at=201)
    for minute in range(1, 1000):
        pace.note(0, 10, Phase.EVALUATING, 201 + 60 * minute)
        assert pace.stood_still_s(201 + 60 * minute + 3599) is None
    assert pace.stood_still_s(201 + 60 * 999 + 3601) == 3601
    for rank in (0, 1):
        pace.note(rank, 10, Phase.STEP, 61_000)
    assert pace.stood_still_s(61_101) == 101
    for rank in (0, 1):
        pace.note(rank, 11, Phase.STEP, 61_020)
    assert pace.median_s == 20


@pytest.mark.parametrize(("longest", "limit"), [(200, 1000), (2, 600)])
def test_a_later_checkpoint_has_five_times_the_longest_one_and_ten_minutes_at_least(longest: int, limit: int) -> None:
    pace = stepping(seconds=20)
    long_phase(pace, Phase.SAVING, 201, 201 + longest)
    for rank in (0, 1):
        pace.note(rank, 10, Phase.SAVING, 500)
    assert pace.stood_still_s(500 + limit - 1) is None
    assert pace.stood_still_s(500 + limit + 1) == limit + 1


def test_zero_turns_it_off() -> None:
    assert stepping(seconds=20, least_s=0).stood_still_s(10000) is None
    assert in_phase(Phase.SAVING, at=201, start_s=0).stood_still_s(50_000) is None


def starting(now: float, **phases: Phase) -> HangDetector:
    pace = HangDetector(2, start_s=100)
    pace.begin(0)
    for name, phase in phases.items():
        pace.note(int(name[-1]), 0, phase, now)
    return pace


def test_a_start_is_over_once_every_rank_has_done_a_step() -> None:
    pace = starting(5, rank0=Phase.LOADING)
    start = pace.start(20)
    assert start is not None
    assert (start.seconds, dict(start.phases)) == (20, {0: Phase.LOADING, 1: None})
    for rank in (0, 1):
        assert pace.start(30) is not None
        pace.note(rank, 1, Phase.STEP, 30)
    assert pace.start(30) is None


def test_a_start_has_its_own_limit_from_one_piece_of_news_to_the_next() -> None:
    pace = starting(90, rank0=Phase.TOKENIZING, rank1=Phase.CONNECTING)
    assert pace.stood_still_s(190) is None
    assert pace.stood_still_s(191) == 101
    pace.note(0, 0, Phase.TOKENIZING, 180, count=11_008)
    assert pace.stood_still_s(280) is None
    pace.note(0, 0, Phase.TOKENIZING, 270, count=11_008)  # says it again
    assert pace.stood_still_s(281) == 101


def test_a_run_that_nobody_has_started_is_no_start() -> None:
    assert HangDetector(2, start_s=1).start(100) is None
