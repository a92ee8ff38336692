"""`dstrain tune` over the real launcher, with ranks that only keep time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dstrain.cli.output.tune import Row, verdict, winner
from dstrain.config.edits.lock import read_lock
from dstrain.launch.run.trial import Ending, Trial
from dstrain.monitor.windows import measurement
from dstrain.plan.estimate import assess
from tests.cases import ask
from tests.cli.conftest import Type
from tests.cli.test_run import change, job

__all__ = ["job"]


def light(checkout: Path, steps: str = "") -> dict[str, str]:
    """Returns the environment of ranks that only keep time."""
    return {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(checkout), "LIGHT_STEPS": steps}


def stage(folder: Path) -> int:
    found: int = json.loads((folder / "ds_config.json").read_text())["zero_optimization"]["stage"]
    return found


def say_steps(job: Path, steps: str) -> None:
    change(job, 'env: {"DS_ACCELERATOR": "cpu"}', f'env: {{"DS_ACCELERATOR": "cpu", "LIGHT_STEPS": "{steps}"}}')


@pytest.mark.parts(6, at=3)
def test_the_fastest_is_written_edits_stay_and_what_failed_is_a_result(
    dstrain: Type, job: Path, light_checkout: Path
) -> None:
    say_steps(job, "2=0.06,1=0.02,3=oom")
    change(job, "seed: 42", "seed: 7  # mine")
    change(job.parent / "ds_config.json", '"overlap_comm": true', '"overlap_comm": false')
    done = dstrain("tune", "--steps", "10", "--candidates", "4", "--json", **light(light_checkout))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["title"]: row for row in found["candidates"]}
    verdicts = {title: row["verdict"] for title, row in rows.items()}
    present = next(title for title, row in rows.items() if row["is_present"])
    assert found["winner"] == present.replace("ZeRO-2", "ZeRO-1"), verdicts
    assert verdicts[present.replace("ZeRO-2", "ZeRO-3")] == "out of memory"
    assert 0.02 < rows[found["winner"]]["step_s"] < rows[present]["step_s"]
    assert (stage(job.parent), "seed: 7  # mine" in job.read_text()) == (1, True)
    config = json.loads((job.parent / "ds_config.json").read_text())
    assert config["zero_optimization"]["overlap_comm"] is False
    assert "not kept as calibration: the plan predicts no time for a CPU" in done.stderr
    assert not list((job.parent / "output" / "tune").rglob("checkpoint-*"))
    _goes_on(dstrain, job, found, light_checkout)


def test_compiled_layers_win_if_their_steps_save_more_than_compiling_takes(
    dstrain: Type, job: Path, light_checkout: Path
) -> None:
    say_steps(job, "2=0.06,2c=0.02,1=0.08")
    change(job, "num_train_epochs: 3", "max_steps: 100000")
    done = dstrain("tune", "--steps", "10", "--candidates", "2", "--json", **light(light_checkout))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    last = found["candidates"][-1]
    assert "torch.compile" in found["winner"] == last["title"]
    assert last["configuration"]["torch_compile"] and last["pays_back_after_steps"] is not None
    assert "of it compiling" in done.stderr
    assert "torch_compile: true" in job.read_text()
    assert dstrain("gen-config").returncode == 0
    assert "torch_compile: true" in job.read_text()


def row(step_s: float, start_s: float, **given: Any) -> Row:
    """Returns a run of ten steps of the same length."""
    lines = [{"step": n, "tokens": 8, "tokens_per_s": 8 / step_s, "step_s": step_s} for n in range(11)]
    trial = Trial(ending=Ending.MEASURED, key="", seconds=9.0, start_s=start_s, measured=measurement(lines))
    request = ask(model="qwen3-0.6b", gpus=1, torch_compile="base" in given)
    estimate = assess(request.workload, request.request.configuration)
    return Row(title="", estimate=estimate, num_gpus=1, trial=trial, **given)


@pytest.mark.parametrize(("planned", "wins"), [(399, False), (401, True), (None, False)])
def test_compiling_has_to_pay_back_within_the_run(planned: int | None, wins: bool) -> None:
    base = row(1.0, 20.0, is_present=True)
    compiled = row(0.75, 120.0, base=base, planned_steps=planned)
    assert (compiled.compile_s, compiled.pays_back_after) == (100.0, 400)
    best = winner([base, compiled])
    assert best is (compiled if wins else base)
    said = verdict(compiled, best, [base, compiled])
    assert said.startswith(
        "fastest; compiling takes 1 min 40 s" if wins else "-25.0 % time; compiling takes 1 min 40 s"
    )


def _goes_on(dstrain: Type, job: Path, found: dict[str, Any], light_checkout: Path) -> None:
    """Asserts that tune reuses its measurements, and that gen-config keeps the values that it wrote."""
    done = dstrain("tune", "-n", "--steps", "10", "--candidates", "4", "--json", **light(light_checkout))
    again = {row["title"]: row for row in json.loads(done.stdout)["candidates"]}
    assert again[found["winner"]]["is_present"]
    known = {title for title, row in again.items() if row["was_measured_before"]}
    assert {row["title"] for row in found["candidates"] if row["title"] in again} <= known
    assert len(known) > 1
    assert dstrain("gen-config").returncode == 0
    assert stage(job.parent) == 1
    lock = read_lock(job.parent)
    assert lock is not None
    assert (lock.inputs["zero_stage"], lock.inputs["seq_len"]) == (1, 64)


def test_ctrl_c_keeps_what_was_measured_and_writes_nothing(dstrain: Type, job: Path, light_checkout: Path) -> None:
    say_steps(job, "2=0.02,1=30")
    before = (job.parent / "ds_config.json").read_text()
    line = [sys.executable, "-m", "dstrain.cli", "tune", "--steps", "10", "--candidates", "2", "--no-doctor"]
    environment = {**os.environ, **light(light_checkout), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(line, cwd=job.parent, env=environment, stderr=subprocess.PIPE, text=True)
    trials = job.parent / "output" / "tune"
    until = time.monotonic() + 100
    while not list(trials.glob("zero-1*/logs/*rank0.log")) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "type the same command again" in said
    assert [path.parent.name[:6] for path in trials.glob("*/trial.json")] == ["zero-2"]
    assert (job.parent / "ds_config.json").read_text() == before


def test_what_the_budget_does_not_allow_is_named(dstrain: Type, job: Path) -> None:
    done = dstrain("tune", "--budget", "0.000001", "--candidates", "3")
    said = " ".join(done.stderr.split())
    assert (done.returncode, "no time for ZeRO-2, " in said, "; ZeRO-1, " in said) == (1, True, True), said


def test_a_dry_run_says_what_would_run_and_writes_nothing(dstrain: Type, job: Path) -> None:
    done = dstrain("tune", "-n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("* ZeRO-2, ")
    assert "6 runs; the plan predicts no time here" in done.stdout
    assert not (job.parent / "output").exists()


def test_what_was_given_or_edited_stays(dstrain: Type, job: Path) -> None:
    change(job, "grad_ckpt: false", "grad_ckpt: true")
    assert dstrain("gen-config", "--zero-stage", "2").returncode == 0
    done = dstrain("tune", "-n", "--json", "--candidates", "6")
    configurations = [row["configuration"] for row in json.loads(done.stdout)["candidates"]]
    assert "fixed    grad_ckpt, zero_stage" in done.stderr
    assert {(one["zero_stage"], one["grad_ckpt"]) for one in configurations} == {(2, True)}
    assert len(configurations) > 1


def test_a_model_that_the_planner_does_not_know_is_refused(dstrain: Type, job: Path) -> None:
    change(job, 'method: "full"', "lora:\n  modules_to_save: [mlp]\nmethod: lora")
    done = dstrain("tune", "-n")
    assert (done.returncode, "nothing to compare" in done.stderr) == (3, True)


@pytest.mark.parametrize("words", [("--steps", "9"), ("--candidates", "1"), ("--budget", "0")])
def test_numbers_that_make_no_sense_are_refused(dstrain: Type, words: tuple[str, str]) -> None:
    assert dstrain("tune", *words).returncode == 2
