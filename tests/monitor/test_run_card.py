"""What a run is called in SwanLab, W&B and TensorBoard, and what it is filtered by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import ask

from dstrain.choices import Method
from dstrain.job.monitor import Monitor
from dstrain.job.schema import Job
from dstrain.launch.prepare.job_context import request_of
from dstrain.monitor.run_card import run_card, without_secrets
from dstrain.plan.estimate import estimate

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
