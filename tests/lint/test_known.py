"""Rules that ask for a job, a model or machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.facts import cluster as clusters
from dstrain.facts import gpus, hostfile, probe
from dstrain.facts.cluster import Cluster, Origin
from dstrain.facts.model import ModelFacts
from dstrain.jobfile import JobFile, read_job
from dstrain.launch.known import request_of
from dstrain.plan.estimate import estimate
from dstrain.render.lint.check import check, read
from dstrain.render.lint.finding import Finding, Severity
from dstrain.render.lint.subject import Subject

HEAD = (
    '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",\n'
)


def job(folder: Path, more: str = "", name: str = "Qwen/Qwen3-8B") -> JobFile:
    text = f"model: {name}\noutput_dir: out\nmicro_batch: 2\ngrad_accum: 4\nlearning_rate: 1e-5\n{more}"
    (folder / "job.yaml").write_text(text)
    return read_job(folder / "job.yaml")


def model(name: str) -> ModelFacts:
    return probe.read_model(name)


def cluster(gpu: str = "a100-80g", count: int = 8, **given: Any) -> Cluster:
    return clusters.describe(gpu=gpus.gpu(gpu), gpu_origin=Origin.GIVEN, gpus=count, **given)


def found(body: str, **known: Any) -> list[Finding]:
    """Returns what lint says of a configuration, body and all, when this is known."""
    document, problems = read(HEAD + body, "x.json")
    assert document is not None, problems
    return check(Subject(document=document, is_trainers=True, **known))


def one(rule: str, findings: list[Finding]) -> Finding:
    (finding,) = [each for each in findings if each.rule == rule]
    return finding


ZERO2 = ' "zero_optimization": {"stage": 2}}'


@pytest.mark.parametrize(
    ("key", "line", "wanted"),
    [
        ('"gradient_clipping": 0.5', "1:", "1.0"),
        ('"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}', "5:", "1e-05"),
        ('"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}', "", "[0.9, 0.999] (with adam_beta2)"),
        ('"train_batch_size": 8', "3:", "2 × 4 × 4 GPUs = 32"),
        ('"fp16": {"enabled": true}', "", "false"),
        ('"train_batch_size": null', "3:", "= 32"),
    ],
)
def test_what_contradicts_the_job_names_both_places(tmp_path: Path, key: str, line: str, wanted: str) -> None:
    hosts = hostfile.expand("localhost:4", None)
    text = HEAD.replace(' "gradient_clipping": "auto",', "") if "clipping" in key else HEAD
    document, _ = read(f"{text} {key},\n{ZERO2}", "x.json")
    assert document is not None
    said = one("DS410", check(Subject(document=document, is_trainers=True, job=job(tmp_path), hosts=hosts)))
    assert said.line == 2
    assert f"job.yaml:{line}" in said.problem
    assert wanted in said.problem


def test_auto_and_equal_literals_agree(tmp_path: Path) -> None:
    body = ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "eps": "auto"}},\n' + ZERO2
    assert found(body, job=job(tmp_path)) == []


def test_two_schedules_are_told_which_one_is_used(tmp_path: Path) -> None:
    said = one("DS506", found(' "scheduler": {"type": "WarmupLR"},\n' + ZERO2, job=job(tmp_path)))
    assert said.effect == "this one is used"


def test_experts_that_are_no_leaf_module_are_found() -> None:
    body = ' "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}'
    assert "wait for each other" in one("DS602", found(body, model=model("deepseek-v3"))).effect
    assert [each.rule for each in found(body, model=model("qwen3-30b-a3b"))] == []


def test_a_leaf_module_that_the_model_does_not_have_is_found() -> None:
    body = ' "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Bogus"]}}}'
    said = one("DS210", found(body, model=model("qwen3-30b-a3b")))
    assert said.pointer == "/zero_optimization/leaf_module/classes/0"
    assert "Qwen3MoeSparseMoeBlock" in said.fix


def test_fp16_for_a_model_of_bf16_is_told_where_the_gpu_has_bf16() -> None:
    body = ' "fp16": {"enabled": true},\n' + ZERO2
    assert "bf16" in one("DS604", found(body, model=model("qwen3-8b"), cluster=cluster())).fix
    assert found(body, model=model("qwen3-8b"), cluster=cluster("v100-32g")) == []


def test_adapters_under_zero_3_with_checkpointing_are_told_what_another_script_needs(tmp_path: Path) -> None:
    zero3 = ' "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}'
    said = one("DS605", found(zero3, job=job(tmp_path, "method: lora\ngrad_ckpt: true\n")))
    assert said.severity is Severity.INFO
    assert "use_reentrant" in said.fix
    assert found(zero3, job=job(tmp_path, "method: lora\ngrad_ckpt: false\n")) == []


def test_a_size_that_accelerate_cannot_compute_is_found() -> None:
    body = ' "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}}'
    assert one("DS603", found(body, model=model("qwen3-vl-30b-a3b"))).severity is Severity.ERROR
    assert "DS603" not in [each.rule for each in found(body, model=model("qwen3-8b"))]


def test_a_bucket_larger_than_the_model_costs_bytes_that_are_told() -> None:
    body = ' "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 700000000}}'
    said = one("DS701", found(body, model=model("qwen3-0.6b")))
    assert "more than the 596.0 M parameters of the model" in said.problem
    assert "2.41 GiB of each GPU" in said.effect  # 2 bytes each: the bucket, and a copy no larger than the model


def test_hpz_must_divide_the_gpus_of_a_node() -> None:
    body = ' "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}'
    assert "8 GPUs of a node" in one("DS801", found(body, hosts=hostfile.expand("a:8,b:8", None))).problem
    four = body.replace(": 3}}", ": 4}}")
    assert "DS801" not in [each.rule for each in found(four, hosts=hostfile.expand("a:8,b:8", None))]


def with_estimate(folder: Path, machines: Cluster, body: str, name: str = "qwen3-32b", **more: Any) -> list[Finding]:
    facts, file = model(name), job(folder, "grad_ckpt: true\n")
    needs = estimate(facts, machines, request_of(file.job), json.loads(HEAD + body))
    return found(body, model=facts, job=file, cluster=machines, estimate=needs, **more)


def test_what_does_not_fit_the_gpu_is_told_with_both_numbers(tmp_path: Path) -> None:
    said = one("DS802", with_estimate(tmp_path, cluster(count=8), ' "zero_optimization": {"stage": 1}}'))
    assert said.severity is Severity.ERROR
    assert "GiB on each GPU; a100-80g has 80.0 GiB" in said.problem


def test_nothing_is_said_of_a_gpu_that_was_assumed(tmp_path: Path) -> None:
    assumed = replace(cluster(count=8), gpu_origin=Origin.ASSUMED)
    rules = [each.rule for each in with_estimate(tmp_path, assumed, ' "zero_optimization": {"stage": 1}}')]
    assert "DS802" not in rules


def test_what_does_not_fit_the_ram_is_told(tmp_path: Path) -> None:
    little = cluster(count=8, host_memory_bytes=64 * 2**30, host_memory_origin=Origin.GIVEN)
    body = ' "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
    assert "of RAM on each node" in one("DS803", with_estimate(tmp_path, little, body)).problem


def test_a_drive_that_is_too_small_is_told(tmp_path: Path) -> None:
    nvme = '{"device": "nvme", "nvme_path": "/drive"}'
    body = f' "zero_optimization": {{"stage": 3, "offload_optimizer": {nvme}, "offload_param": {nvme}}}}}'
    machines = cluster("4090", 8, nvme_path="/drive")
    assert "NVMe" in one("DS807", with_estimate(tmp_path, machines, body, free_nvme_bytes=10**9)).problem


def test_a_checkpoint_that_does_not_fit_the_disk_is_told_at_output_dir(tmp_path: Path) -> None:
    said = with_estimate(tmp_path, cluster(count=8), ' "zero_optimization": {"stage": 3}}', free_disk_bytes=10**9)
    place = one("DS804", said)
    assert (Path(place.file).name, place.line) == ("job.yaml", 2)
