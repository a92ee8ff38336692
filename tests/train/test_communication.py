"""Collectives of real ranks: their bytes, and what a late rank or slow links do to them, with the rules that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from benchmarks.health_exam.rank import SETTINGS
from benchmarks.health_exam.record import measured_links
from dstrain.facts.probe import read_model
from dstrain.job.schema import Job, Monitor
from dstrain.monitor.metrics import read_jsonl
from dstrain.train.rank import Rank
from dstrain.train.setup import observed
from tests.train.engine import Engine
from tests.train.launching import lines, make_run, said

pytestmark = pytest.mark.parts(6, at=3)

MEASURED, THROTTLED = 1e9, 5e7
"""Bytes per second that the links are said to have, and that they are held to."""


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, made_demo: Path, engine: Engine) -> Path:
    """Two runs under ZeRO-3: one whose rank 1 works longer, and one with slow links and a model of some MB."""
    folder = root / "hindered"
    for name, cause, size, model, steps in (
        ("slow", "slow rank", 1.5, demo, 10),
        ("links", "throttled links", THROTTLED, made_demo, 5),
    ):
        run = make_run(folder / name, model, zero={"stage": 3}, max_steps=steps)
        (run / "facts.json").write_text(json.dumps(measured_links(model / "model", MEASURED)))
        settings = {"cause": cause, "onset": 1, "size": size, "on_rank": 1}
        (run / SETTINGS).write_text(json.dumps(settings))
        codes = engine.run("benchmarks.health_exam.rank", run, log=Path(f"{run}.log"))
        assert codes == [0, 0], said(run)[-3000:]
    return folder


def _broken(run: Path) -> dict[str, dict[str, Any]]:
    return {line["rule"]: line for line in read_jsonl(run / "health.jsonl")}


def test_zero_3_gathers_all_weights_twice_and_scatters_all_gradients_once(runs: Path, demo: Path) -> None:
    weights = 2 * read_model(str(demo / "model")).num_params  # bytes in bf16
    window = lines(runs / "slow")[-1]
    assert window["comm/all_gather_bytes"] == pytest.approx(2 * weights, rel=0.01)
    assert window["comm/reduce_scatter_bytes"] == pytest.approx(weights, rel=0.01)


def test_a_slow_rank_under_zero_3_is_the_one_that_waits_least(runs: Path) -> None:
    windows = lines(runs / "slow")[1:]
    assert all(window["comm_s_by_rank"][1] < window["comm_s_by_rank"][0] for window in windows)
    assert _broken(runs / "slow")["slow_rank"]["rank"] == 1


def test_what_ranks_wait_and_work_is_no_more_than_the_step(runs: Path) -> None:
    for window in lines(runs / "slow") + lines(runs / "links"):
        for waits, works in zip(window["comm_s_by_rank"], window["own_s_by_rank"], strict=True):
            assert 0 < waits + works <= window["step_s"]


def test_a_rank_that_sleeps_in_its_passes_has_no_core_there_and_callbacks_are_told_apart(runs: Path) -> None:
    windows = lines(runs / "slow")[1:]
    assert all(window["host_s_by_rank"][1] > window["host_s_by_rank"][0] for window in windows)
    for window in windows:
        rest = window["own_s_by_rank"][1] - window["host_s_by_rank"][1] - window["other_s_by_rank"][1]
        assert window["other_s_by_rank"][1] > 0
        assert window["other_s_by_rank"][0] < window["step_s"] - window["comm_s_by_rank"][0], "waiting is not there"
        assert rest > 0


def test_links_slower_than_measured_are_told_with_their_share(runs: Path) -> None:
    window = lines(runs / "links")[-1]
    assert THROTTLED / 10 < window["bus_bytes_per_s"] < THROTTLED
    finding = _broken(runs / "links")["bus_bandwidth"]
    assert finding["severity"] == "critical"
    assert "dstrain doctor --network" in finding["message"]
    assert "slow_rank" not in _broken(runs / "links")


def test_a_job_may_leave_collectives_alone() -> None:
    untouched = dist.all_reduce
    job = Job(model="m", output_dir="o", monitor=Monitor(collectives=False))
    observed(Rank(index=0, local_index=0, world_size=2), job, on_gpu=False)
    assert dist.all_reduce is untouched
