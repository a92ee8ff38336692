"""`dstrain report`: one run, several, and folders that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrain.preflight import Check, CheckName, Preflight
from dstrain.records import to_json
from dstrain.rundir import RunDir
from tests.report.runs import gpu_run, night

Type = Callable[..., Any]


def test_the_verdict_comes_first_and_the_plan_beside_it(dstrain: Type, tmp_path: Path) -> None:
    gpu_run(tmp_path / "output", slower=1.25, waits=0.2)
    done = dstrain("report")
    first, *rest = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert first == "output: not known to have ended, 40 of 40 steps"
    rows = {line.split("  ")[0]: line for line in rest}
    assert "+25.0 % (plan ± " in rows["time of a step"]
    assert "-20.0 %" in rows["tokens/s per GPU"]
    assert "waiting for data" in rows["differs most"]
    assert "`dstrain calibrate output`" in rows["next"]
    assert "\x1b" not in done.stdout


def test_checks_before_the_first_step_are_counted_and_those_that_failed_are_told(dstrain: Type, tmp_path: Path) -> None:
    checks = (
        Check(name=CheckName.WORST_BATCH, passed=True, text="2 × 64 tokens", seconds=2.0),
        Check(name=CheckName.FIRST_LOSS, passed=False, text="18; a model that guesses has ln(2,048) = 7.625"),
        Check(name=CheckName.EVALUATION, passed=None, text="skipped"),
    )
    record = Preflight(step=0, checks=checks, seconds=2.0, limit_s=60.0)
    RunDir(night(tmp_path / "night")).preflight.write_text(to_json(record))
    out = dstrain("report", str(tmp_path / "night")).stdout
    assert "worst batch passed before the first step, in 2.00 s" in out
    assert "✗ first loss: 18; a model that guesses has ln(2,048) = 7.625" in out
    assert "- evaluation: skipped" in out
    (document,) = json.loads(dstrain("report", str(tmp_path / "night"), "--json").stdout)["runs"]
    assert [check["passed"] for check in document["preflight"]["checks"]] == [True, False, None]


def test_json_has_every_run_with_its_figures(dstrain: Type, tmp_path: Path) -> None:
    night(tmp_path / "a")
    gpu_run(tmp_path / "b")
    document = json.loads(dstrain("report", "a", "b", "--json").stdout)
    one, other = document["runs"]
    assert (document["schema"], one["stage"], other["stage"]) == (1, "ended", "unknown")
    assert one["restarts"][0]["from_step"] == 15
    assert {each["quantity"] for each in other["comparisons"]} >= {"step_s", "mfu", "peak_bytes_per_gpu"}
    assert one["versions"]["deepspeed"] == "0.19.8"
    assert len(one["losses"]) == 60


def test_several_runs_are_a_table(dstrain: Type, tmp_path: Path) -> None:
    gpu_run(tmp_path / "a")
    gpu_run(tmp_path / "b", slower=2, steps=20)
    done = dstrain("report", "a", "b")
    rows = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    assert rows["max_steps"] == ["40", "20"]
    assert done.stdout.splitlines()[0].split() == ["a", "b"]
    assert "(+100.0 %)" in done.stdout


def test_a_folder_that_is_no_run_is_an_error_that_says_what_to_name(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain("report", "nothing")
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing is not a run directory" in done.stderr
    assert "output_dir" in done.stderr
