"""`dstrain report`: one run, several, and folders that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
