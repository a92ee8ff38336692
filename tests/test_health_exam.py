"""The exam of the health rules, and the gallery: recorded runs with a known cause, and what is said of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.health_exam.gallery import SHOWN, write
from benchmarks.health_exam.score import FOLDER, WITHIN, Result, false_per_1000, replay
from benchmarks.health_exam.traces import CAUSES, JOB, LATE, all_traces
from benchmarks.health_exam.whole_runs import FOLDER as WHOLE
from benchmarks.health_exam.whole_runs import WHOLE_RUNS, WholeRun
from dstrain.job.schema import HealthRule

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"
TRACES = {trace.name: trace for trace in all_traces()}


@cache
def result(name: str) -> Result:
    return replay(TRACES[name])


def test_every_recorded_run_is_scored() -> None:
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == TRACES.keys()
    assert sum(trace.cause is None for trace in TRACES.values()) == 20


@pytest.mark.parametrize("name", [name for name, trace in TRACES.items() if trace.cause is not None])
def test_a_cause_is_named_within_three_windows_of_its_full_size(name: str) -> None:
    run = result(name)
    assert run.named is not None
    cause = TRACES[name].cause
    assert cause is not None
    growth = cause.grows_over // TRACES[name].job.get("logging_steps", JOB["logging_steps"])
    assert run.delay(run.named) <= WITHIN + growth or cause.name in LATE


def test_recorded_runs_break_every_rule() -> None:
    examined = {rule for cause in CAUSES for rule in cause.named_by}
    broken = {finding.rule for name in TRACES for finding in result(name).findings}
    assert set(HealthRule) <= examined | broken


@pytest.mark.parametrize("name", [name for name in TRACES if name.startswith(("slow-rank", "rank-that-slows"))])
def test_the_slow_rank_is_the_one_that_was_slowed(name: str) -> None:
    named = result(name).named
    assert named is not None
    assert named.rank == TRACES[name].on_rank


def test_there_is_at_most_one_false_warning_in_a_thousand_steps() -> None:
    for half in (0, 1):
        assert false_per_1000([result(name) for name, trace in TRACES.items() if trace.half == half]) <= 1


def test_the_gallery_is_what_its_command_writes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shown = [result(name) for name in SHOWN]
    update = request.config.getoption("--update")
    pages = write(shown, WHOLE_RUNS, GALLERY if update else tmp_path)
    assert {page.name for page in pages} == {page.name for page in GALLERY.iterdir()}
    for page in pages:
        assert page.read_text() == (GALLERY / page.name).read_text(), "run pytest --update"
    for page, run in zip(pages[: len(shown)], shown, strict=True):
        assert run.named is not None
        assert run.named.rule in page.read_text()


def test_every_whole_run_is_kept() -> None:
    assert {path.stem for path in WHOLE.iterdir()} == {one.name for one in WHOLE_RUNS}


@pytest.mark.parametrize("run", WHOLE_RUNS, ids=lambda run: run.name)
def test_the_page_of_a_whole_run_says_what_is_wrong_and_what_to_change(run: WholeRun) -> None:
    page = (GALLERY / f"{run.name}.html").read_text()
    assert [text for text in run.says if text not in page] == []


@pytest.mark.parametrize(("page", "to"), [("docs/health.md", "gallery"), ("docs/zh/health.md", "../gallery")])
def test_every_page_of_the_gallery_is_listed_with_its_cause(page: str, to: str) -> None:
    text = (GALLERY.parents[1] / page).read_text()
    assert [path.name for path in GALLERY.iterdir() if f"({to}/{path.name})" not in text] == []
