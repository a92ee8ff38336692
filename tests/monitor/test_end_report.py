"""The card that experiment trackers get at the start of a run, and the report at its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases import ask

from dstrain.choices import Method
from dstrain.job.schema import Job, Monitor
from dstrain.launch.prepare.job_context import request_of
from dstrain.monitor.end_report import end_report, run_card, without_secrets
from dstrain.monitor.run_record import RunRecord, read
from dstrain.plan.estimate import estimate
from dstrain.rundir import RunDir
from tests.report.runs import BEGAN, collectives, gpu_run


def ended(folder: Path) -> RunRecord:
    place = RunDir(gpu_run(folder, slower=1.5, more=collectives(late=0.5)))
    told = [
        {"rule": "loss_spike", "step": 9, "message": "of an earlier run", "time_s": BEGAN - 9},
        {"rule": "slow_rank", "step": 20, "message": "step 20: rank 7", "time_s": BEGAN + 900},
    ]
    place.health.write_text("".join(f"{json.dumps(line)}\n" for line in told))
    return read(place)


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
    ended(tmp_path / "run")
    best = {"step": 20, "loss": 1.5, "stopped_at": 40, "evaluations": 2}
    RunDir(tmp_path / "run").summary.write_text(json.dumps({"best": best}))
    run = read(RunDir(tmp_path / "run"))
    texts = [table.text for how in ("success", "crashed") if (table := end_report(run, how=how)) is not None]
    assert ["**best model**: stopped early at step 40" in text for text in texts] == [True, False]


def test_a_run_without_a_logged_step_has_none(tmp_path: Path) -> None:
    assert end_report(replace(ended(tmp_path / "run"), windows=()), how="crashed") is None


JOB = Job(
    model="Qwen/Qwen3-8B", output_dir="output", data="train.jsonl", method=Method.LORA, micro_batch=2, grad_accum=4
)
CONFIG = {"zero_optimization": {"stage": 2}}


def test_a_run_is_named_by_what_it_is_and_has_what_people_filter_by() -> None:
    asked = ask(model="qwen3-8b", gpus=4, gpu="4090", seq_len=1024)
    needs = estimate(asked.workload, request_of(JOB), CONFIG)
    found = run_card(
        JOB, CONFIG, num_ranks=4, model=asked.workload.model, cluster=asked.workload.cluster, estimate=needs
    )
    assert found.name == "qwen3-8b-lora-4x4090-zero2"
    assert found.tags == ("qwen3-8b", "lora", "4x4090", "zero2", "bf16")
    config = found.config
    assert (config["num_params"], config["gpu"], config["num_gpus"]) == (8_190_735_360, "rtx-4090", 4)
    assert (config["global_batch"], config["data"]) == (32, "train.jsonl")
    assert config["num_trainable_params"] == needs.num_trainable_params
    assert config["predicted"]["device_bytes_per_gpu"] == needs.memory.device_bytes_per_gpu
    assert needs.speed is not None
    assert config["predicted"]["step_s"] == needs.speed.step_s
    for said in ("8.19 B parameters", "4x4090", "32 samples", "train.jsonl", "predicted: "):
        assert said in found.description


def test_a_name_in_the_job_wins() -> None:
    job = replace(JOB, monitor=Monitor(name="mine"))
    assert run_card(job, CONFIG, num_ranks=1, model=None, cluster=None, estimate=None).name == "mine"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/data/My Model/", "my-model-lora-2xgpu-zero0"),
        ("Qwen/Qwen3-8B", "qwen3-8b-lora-2xgpu-zero0"),
        (".", "model-lora-2xgpu-zero0"),
    ],
)
def test_without_facts_the_jobs_own_words_name_it(model: str, name: str) -> None:
    job = replace(JOB, model=model)
    assert run_card(job, {"zero_optimization": []}, num_ranks=2, model=None, cluster=None, estimate=None).name == name


def test_secrets_of_a_configuration_and_of_its_edits_are_left_out() -> None:
    config = {
        "comet": {"api_key": "k", "project": "p"},
        "ranks": 4,
        "edits": {"ds_config.json": {"comet.api_key": {"base": "a", "yours": "b"}}},
    }
    shown = without_secrets(config)
    assert shown["comet"] == {"api_key": "(secret)", "project": "p"}
    assert shown["ranks"] == 4
    assert set(shown["edits"]["ds_config.json"]["comet.api_key"].values()) == {"(secret)"}
