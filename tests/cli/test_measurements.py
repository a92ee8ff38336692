"""All verbs count with the same measurements: a calibration, links of `doctor --network`, a given link."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dstrain.config import jsonc
from dstrain.config.edits.lock import planned_cluster
from dstrain.facts.cluster import calibration, measured_links
from dstrain.facts.cluster.calibration import Measured
from dstrain.facts.cluster.measured_links import MeasuredLinks
from dstrain.job.file import read_job
from dstrain.launch.prepare.job_context import job_context, request_of, workload_of
from dstrain.launch.prepare.lint_job import lint_text
from dstrain.launch.prepare.prepare import prepare
from dstrain.plan.estimate import estimate
from dstrain.plan.estimate_records import Estimate
from tests.cli.conftest import Type, edit

PLAN = ("gen-config", "--hosts", "gpu[01-02]", "--gpu", "a100", "--model", "qwen3-8b", "--data", "train.jsonl")
SLOW = MeasuredLinks(
    hosts=("gpu01", "gpu02"),
    gpu="a100-80g",
    gpus_per_node=8,
    backend="nccl",
    date="2026-11-22",
    inter_bus_bytes_per_s=6e9,
    intra_bus_bytes_per_s=150e9,
)
MEASURED = Measured(gemm_ratio=0.4, context_bytes=3 * 2**30, nccl_bytes=0, reserved_ratio=1.4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, also of what the test calls itself, on a machine without GPUs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    return tmp_path / "home" / ".dstrain"


def answers(dstrain: Type, folder: Path) -> dict[str, tuple[int, float]]:
    """Returns bytes and seconds that each verb counts for the files of a folder."""
    file, path = read_job(folder / "job.yaml"), folder / "ds_config.json"
    text = path.read_text()
    context = job_context(file, planned_cluster(folder))
    linted = lint_text(context, text, "ds_config.json").subject
    workload = workload_of(context)
    assert linted is not None
    assert workload is not None
    explained = json.loads(dstrain("explain", "ds_config.json", "--json", HOME=str(folder / "home")).stdout)
    rows: Mapping[str, Any] = {
        "lint": linted.estimate,
        "run": prepare(file, {}).estimate,
        "explain KEY": estimate(workload, request_of(file.job), jsonc.parse(text, "x").value),
    }
    found = {name: _figures(one) for name, one in rows.items()}
    found["explain FILE"] = (explained["memory"]["device_bytes_per_gpu"], explained["step_s"])
    return found


def _figures(one: Estimate | None) -> tuple[int, float]:
    assert one is not None
    assert one.speed is not None
    return one.memory.device_bytes_per_gpu, one.speed.step_s


def planned(dstrain: Type, folder: Path, *words: str) -> tuple[int, float]:
    """Returns bytes and seconds of the plan that gen-config chooses, and writes it."""
    done = dstrain(*PLAN, *words, "--json", HOME=str(folder / "home"))
    assert done.returncode == 0, done.stderr
    chosen = json.loads(done.stdout)["plans"][0]
    return chosen["memory"]["device_bytes_per_gpu"], chosen["speed"]["step_s"]


def test_all_verbs_say_the_same_as_the_plan(dstrain: Type, home: Path, tmp_path: Path) -> None:
    calibration.save("a100-80g", MEASURED, str(home / "calibration.json"))
    measured_links.save(SLOW, str(home / "links.json"))
    plan = planned(dstrain, tmp_path, "--interconnect", "eth25")
    found = answers(dstrain, tmp_path)
    assert found == {name: pytest.approx(plan) for name in found}


def test_a_measurement_changes_what_each_verb_says_of_the_same_files(dstrain: Type, home: Path, tmp_path: Path) -> None:
    before = planned(dstrain, tmp_path)
    calibration.save("a100-80g", MEASURED, str(home / "calibration.json"))
    measured_links.save(SLOW, str(home / "links.json"))
    after = answers(dstrain, tmp_path)
    assert len(set(after.values())) == 1
    assert next(iter(after.values())) > before


def test_diff_counts_with_them_too(dstrain: Type, home: Path, tmp_path: Path) -> None:
    planned(dstrain, tmp_path)
    edit(tmp_path / "job.yaml", "seq_len: 4096", "seq_len: 2048")
    before = dstrain("explain", "--edits", HOME=str(tmp_path / "home")).stdout
    measured_links.save(SLOW, str(home / "links.json"))
    assert dstrain("explain", "--edits", HOME=str(tmp_path / "home")).stdout != before
