"""A run that runs out of memory: what it writes, what it says, and how it goes on by itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dstrain.monitor.metrics import current_steps, read_jsonl
from dstrain.monitor.run_record import read
from dstrain.report.report import report
from dstrain.rundir import RunDir
from tests.train import memory_limit
from tests.train.launching import environment

pytestmark = [pytest.mark.cluster, pytest.mark.parts(6, at=0)]

DEVICE_BYTES = 64 * 2**20
STEPS, SAVED, GLOBAL_BATCH = 2, 1, 32


@dataclass
class Adapted:
    done: subprocess.CompletedProcess[str]
    folder: Path
    config: str

    @property
    def adaptations(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "output" / "adaptations.jsonl")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, made_demo: Path) -> Adapted:
    """A run on two ranks whose device shrinks after the first checkpoint."""
    folder = tmp_path_factory.mktemp("oom")
    (folder / "site").mkdir()
    shutil.copy(memory_limit.__file__, folder / "site" / "sitecustomize.py")
    variables = environment(folder) | {
        "DSTRAIN_TEST_DEVICE_BYTES": str(DEVICE_BYTES),
        "DSTRAIN_TEST_LIMIT_FROM": str(folder / "output" / f"checkpoint-{SAVED}" / "complete.json"),
    }
    variables["PYTHONPATH"] += f":{folder / 'site'}"

    def dstrain(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-P", "-m", "dstrain.cli", *words]
        return subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)

    asked = ("--model", str(made_demo / "model"), "--data", str(made_demo / "train.jsonl"), "--seq-len", "256")
    given = ("--global-batch", str(GLOBAL_BATCH), "--micro-batch", "16", "--no-grad-ckpt", "--loss", "full")
    made = dstrain("gen-config", "--gpus", "2", "--gpu", "cpu", *asked, *given, "--zero-stage", "2", "--packing")
    assert made.returncode == 0, made.stderr
    config = (folder / "ds_config.json").read_text()
    steps = (
        "--set",
        f"max_steps={STEPS}",
        "--set",
        f"save_steps={SAVED}",
        "--set",
        "logging_steps=1",
        "--set",
        "monitor.sinks=[]",
    )
    return Adapted(dstrain("run", "--on-oom", "adapt", "--no-doctor", *steps), folder, config)


def test_it_goes_on_from_the_last_checkpoint_to_the_end(adapted: Adapted) -> None:
    assert adapted.done.returncode == 0, adapted.done.stderr
    assert f"starting again from step {SAVED}, " in adapted.done.stderr
    logged = current_steps(read_jsonl(adapted.folder / "output" / "metrics.jsonl"))
    assert [line["step"] for line in logged if "loss" in line][-1] == STEPS
    assert json.loads((adapted.folder / "output" / "summary.json").read_text())["steps"] == STEPS


def test_the_record_has_what_the_device_held_and_what_was_planned(adapted: Adapted) -> None:
    record = adapted.adaptations[0]["oom"]
    measured = record["measured"]
    assert (record["rank"] in (0, 1), record["step"], record["phase"] in ("forward", "backward")) == (True, SAVED, True)
    assert (record["batch"]["rows"], record["batch"]["tokens_per_row"]) == (16, 256)
    assert sum(record["batch"]["samples"]) <= 16 * 256
    assert measured["device_bytes"] == DEVICE_BYTES
    assert measured["allocated_bytes"] <= DEVICE_BYTES < measured["allocated_bytes"] + measured["requested_bytes"]
    predicted, states = record["predicted"], record["states"]
    assert predicted["parts"]["logits"] > 0
    largest = [one["size_bytes"] * one["count"] for one in predicted["largest"]]
    assert largest == sorted(largest, reverse=True)
    assert 0 < sum(largest) <= predicted["live_bytes_per_gpu"]
    ledger = {one["part"]: (one["predicted_bytes"], one["measured_bytes"]) for one in record["ledger"]}
    assert ledger["parameters"] == (predicted["parts"]["params"], states["params"])
    assert ledger["parameters"][1] == pytest.approx(ledger["parameters"][0], rel=0.01)
    assert ledger["optimizer states"][1] == pytest.approx(ledger["optimizer states"][0], rel=0.01)
    assert sum(held for _, held in ledger.values()) == DEVICE_BYTES - measured["free_bytes"]


def test_a_change_is_said_and_overrides_files_that_stay_as_they_are(adapted: Adapted) -> None:
    chosen = adapted.adaptations[-1]
    assert chosen["device_bytes_per_gpu"] < DEVICE_BYTES
    assert "overridden for this run: " in adapted.done.stderr
    assert all(item in adapted.done.stderr for item in chosen["set"])
    assert (adapted.folder / "ds_config.json").read_text() == adapted.config
    request = json.loads((adapted.folder / "output" / "request.json").read_text())
    assert request["micro_batch"] * request["grad_accum"] * 2 == GLOBAL_BATCH


def test_the_report_has_the_restart_with_its_cause_and_what_was_changed(adapted: Adapted) -> None:
    one = report(read(RunDir(adapted.folder / "output")), now=0)
    assert [restart.from_step for restart in one.restarts] == [SAVED] * len(adapted.adaptations)
    assert "Out of GPU memory" in str(one.restarts[0].cause)
    assert [restart.change for restart in one.restarts] == [line["change"] for line in adapted.adaptations]
    assert len(one.recorded.adaptations) == len(adapted.adaptations)
    assert "deepspeed" in one.recorded.versions
