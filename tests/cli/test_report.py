"""`dstrain report`: one run, several, and folders that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dstrain.facts.probe import read_model
from dstrain.monitor.outcomes import Check, CheckName, Preflight
from dstrain.records import to_data, to_json
from dstrain.rundir import RunDir
from tests.cli.conftest import Type
from tests.report.runs import collectives, gpu_run, night


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
    assert "`dstrain report output --calibrate`" in rows["next"]
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


def test_a_shared_record_is_a_kilobyte_without_names(dstrain: Type, tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "acme-secret", more=collectives())
    facts = json.loads((folder / "facts.json").read_text())
    model = to_data(read_model("qwen3-8b")) | {"name": "acme-8b", "source": "/home/me/acme-8b"}
    versions = {"torch": "2.13.0+cu130", "deepspeed": "0.19.8+acme"}
    (folder / "facts.json").write_text(json.dumps(facts | {"model": model, "versions": versions}))
    plan = json.loads((folder / "plan.json").read_text())
    plan["configuration"] |= {"method": "lora", "lora": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": ["acme"]}}
    (folder / "plan.json").write_text(json.dumps(plan))
    done = dstrain("report", str(folder), "--share", "run.json")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run.json").read_text()
    assert done.stdout == text, "it is shown before it is written"
    assert len(text) < 1400
    assert not re.search("acme|home|secret|localhost", text)
    record = json.loads(text)
    assert (record["gpu"], record["gpus_per_node"], record["num_params"]) == ("h100-sxm", 8, 8190735360)
    assert record["measured"]["step_s"] == pytest.approx(record["planned"]["step_s"], rel=1e-3)
    assert record["versions"] == {"torch": "2.13.0+cu130", "deepspeed": "0.19.8"}


def test_a_record_is_only_printed_for_a_dash_and_replaces_no_other_file(dstrain: Type, tmp_path: Path) -> None:
    night(tmp_path / "night")
    done = dstrain("report", "night", "--share", "-")
    assert (done.returncode, "nothing was written" in done.stderr) == (0, True)
    assert json.loads(done.stdout)["gpu"] == "cpu"
    (tmp_path / "mine.json").write_text("{}")
    done = dstrain("report", "night", "--share", "mine.json")
    assert (done.returncode, (tmp_path / "mine.json").read_text()) == (6, "{}")
    assert dstrain("report", "night", "night", "--share", "-").returncode == 2
