"""What is looked at before every launch."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dstrain.doctor.checks import quick
from dstrain.findings import errors
from dstrain.job.file import read_job
from dstrain.launch.prepare.prepare import PreparedRun, prepare
from tests.doctor import machines
from tests.doctor.samples import said
from tests.doctor.test_looks import script, smi

JOB = "model: qwen3-0.6b\ndata: train.jsonl\noutput_dir: out\nenv:\n  DS_ACCELERATOR: cpu\n"
CONFIG = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedRun:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return prepare(read_job(tmp_path / "job.yaml"), {})


def test_a_machine_that_can_train_has_no_error(prepared: PreparedRun, tmp_path: Path) -> None:
    started = time.monotonic()
    found = quick(prepared, {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert time.monotonic() - started < 5
    assert errors(found) == [], said(found)
    assert {each.rule for each in found} >= {"software", "ops", "limits", "space", "network"}


def test_a_driver_that_hangs_delays_a_launch_for_seconds_and_stops_none(prepared: PreparedRun, tmp_path: Path) -> None:
    for name in ("nvidia-smi", "dmesg", "journalctl"):
        script(tmp_path, name, "exec sleep 600")
    on_gpus = replace(prepared, job=replace(prepared.job, env={}))
    started = time.monotonic()
    found = quick(on_gpus, {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert time.monotonic() - started < 5
    assert any(line.startswith("! no answer from nvidia-smi within") for line in said(found))
    assert not [each for each in errors(found) if each.rule == "gpus"]


def test_a_gpu_that_cannot_be_trusted_stops_a_run(prepared: PreparedRun, tmp_path: Path) -> None:
    there = smi(tmp_path, xml=machines.smi_xml({"ecc_errors/volatile/dram_uncorrectable": "2"}))
    on_gpus = replace(prepared, job=replace(prepared.job, env={}))
    found = quick(on_gpus, {**there, "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert any(each.rule == "gpus" and "cannot be trusted" in each.problem for each in errors(found))
