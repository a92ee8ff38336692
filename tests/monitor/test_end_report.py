"""The report that experiment trackers get at the end of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dstrain.facts.cluster.cluster import Cluster
from dstrain.monitor.end_report import Ended, end_report, read_end
from dstrain.plan.estimate_records import Estimate
from dstrain.records import from_data, load_json
from dstrain.rundir import RunDir
from tests.report.runs import BEGAN, collectives, gpu_run


def ended(folder: Path) -> Ended:
    place = RunDir(gpu_run(folder, slower=1.5, more=collectives(late=0.5)))
    told = [
        {"rule": "loss_spike", "step": 9, "message": "of an earlier run", "time_s": BEGAN - 9},
        {"rule": "slow_rank", "step": 20, "message": "step 20: rank 7", "time_s": BEGAN + 900},
    ]
    place.health.write_text("".join(f"{json.dumps(line)}\n" for line in told))
    cluster = from_data(Cluster, json.loads(place.facts.read_text())["cluster"], locate=str)
    return read_end(place, estimate=load_json(Estimate, place.plan), cluster=cluster)


def test_it_has_the_figures_beside_the_plan_the_parts_of_a_step_and_what_rules_said(tmp_path: Path) -> None:
    report = end_report(ended(tmp_path / "run"), how="success")
    assert report is not None
    assert report.step == 40
    assert report.text.startswith("# success after 40 steps\n\n|  | planned | measured | off |\n")
    assert "| time of a step | 4.66 s | 7.00 s | +50.0 % (plan ± 8 %) |" in report.text
    assert ("time of a step", "4.66 s", "7.00 s", "+50.0 % (plan ± 8 %)") in report.rows
    assert "waiting for slower ranks 0.44 s (6 %)" in report.text
    assert "- **slow_rank** step 20: rank 7" in report.text
    assert "of an earlier run" not in report.text


def test_a_run_that_stopped_early_says_so_unless_it_failed(tmp_path: Path) -> None:
    run = ended(tmp_path / "run")
    best = {"step": 20, "loss": 1.5, "stopped_at": 40, "evaluations": 2}
    RunDir(tmp_path / "run").summary.write_text(json.dumps({"best": best}))
    run = read_end(RunDir(tmp_path / "run"), estimate=run.estimate, cluster=run.cluster)
    texts = [table.text for how in ("success", "crashed") if (table := end_report(run, how=how)) is not None]
    assert ["**best model**: stopped early at step 40" in text for text in texts] == [True, False]


def test_a_run_without_a_logged_step_has_none(tmp_path: Path) -> None:
    assert end_report(replace(ended(tmp_path / "run"), windows=[]), how="crashed") is None
