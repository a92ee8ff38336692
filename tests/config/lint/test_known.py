"""Rules that ask for a job, a model or machines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Task
from dstrain.config.lint.engine import check, read
from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.lint.subject import JobContext, Subject
from dstrain.errors import InvalidConfig, Place
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus, hostfile
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.cpu import CPU_LIMITS, OFFLOADED, CpuLimit
from dstrain.facts.cluster.hostfile import parse
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.file import JobFile, read_job
from dstrain.job.task_limits import LIMITS, WITH_ADAPTERS, TaskLimit
from dstrain.launch.prepare import hostfile_findings
from dstrain.launch.prepare.hostfile_findings import of_hostfile, of_hosts
from dstrain.launch.prepare.job_context import counted_steps, job_context, request_of
from dstrain.plan.estimate import estimate

HEAD = (
    '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",\n'
)


def job(folder: Path, more: str = "", name: str = "Qwen/Qwen3-8B") -> JobFile:
    text = f"model: {name}\noutput_dir: out\nmicro_batch: 2\ngrad_accum: 4\nlearning_rate: 1e-5\n{more}"
    (folder / "job.yaml").write_text(text)
    return read_job(folder / "job.yaml")


COMPILES = "torch_compile: true\n"


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


OFFLOADS = '"offload_optimizer": {"device": "cpu"}'
ZERO2 = ' "zero_optimization": {"stage": 2}}'


def test_keys_that_dstrain_run_adds_have_the_values_of_the_job(tmp_path: Path) -> None:
    def rules(zero: dict[str, Any], more: str) -> set[str]:
        document, _ = read(json.dumps({"zero_optimization": {"stage": 2, **zero}}), "x.json")
        assert document is not None
        return {each.rule for each in check(Subject(document=document, is_trainers=True, job=job(tmp_path, more)))}

    assert "DS327" in rules({"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}, "")
    for norm in (0, 1):
        assert ("DS331" in rules({}, f"optimizer: muon\nmax_grad_norm: {norm}\n")) is bool(norm)


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
    assert said.place.line == 2
    assert f"job.yaml:{line}" in said.problem
    assert wanted in said.problem


def test_ranks_that_share_rows_count_once_in_the_batch(tmp_path: Path) -> None:
    known: dict[str, Any] = {"job": job(tmp_path, "sp: 2\n"), "hosts": hostfile.expand("localhost:4", None)}
    assert found(f' "train_batch_size": 16,\n{ZERO2}', **known) == []
    assert "2 × 4 × 4 GPUs ÷ sp 2 = 16" in one("DS410", found(f' "train_batch_size": 32,\n{ZERO2}', **known)).problem


@pytest.mark.parametrize(
    ("key", "section"),
    [("tp", '"tensor_parallel": {"autotp_size": 2}'), ("ep", '"expert_parallel": {"enabled": true, "autoep_size": 2}')],
)
def test_parallelism_at_odds_with_its_job_is_an_error(tmp_path: Path, key: str, section: str) -> None:
    written = f" {section},\n{ZERO2}"
    said = one("DS224", found(written, job=job(tmp_path)))
    assert (said.severity, said.fix) == (Severity.ERROR, f"remove it; in job.yaml: {key}: 2")
    assert found(written, job=job(tmp_path, f"{key}: 2\n")) == []
    for zero, problem in [
        ('"stage": 0', f"{key} is 2 without ZeRO"),
        ('"stage": 2, "stage3_gather_16bit_weights_on_model_save": false', f"_save is false with {key} 2"),
    ]:
        body = f' "zero_optimization": {{{zero}}}}}'
        assert problem in one("DS224", found(body, job=job(tmp_path, f"{key}: 2\n"))).problem


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (f' "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}},\n{ZERO2}', "/optimizer"),
        (
            ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
            "/zero_optimization/offload_optimizer",
        ),
    ],
)
def test_nothing_takes_the_place_of_8_bit_adamw(tmp_path: Path, body: str, pointer: str) -> None:
    said = one("DS225", found(body, job=job(tmp_path, "optimizer: adamw_8bit\n")))
    assert (said.severity, said.pointer) == (Severity.ERROR, pointer)
    assert "DS225" not in [each.rule for each in found(body, job=job(tmp_path))]
    assert found(ZERO2, job=job(tmp_path, "optimizer: adamw_8bit\n")) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (' "zero_optimization": {"stage": 0}}', "optimizer is adamw_bf16 with ZeRO-0"),
        (' "bf16": {"bf16_optimizer_states": false},\n' + ZERO2, "bf16_optimizer_states is false"),
        (
            ' "data_types": {"grad_accum_dtype": "fp32"},\n "zero_optimization": {"stage": 1}}',
            "fp32 sums with ZeRO-1",
        ),
        (' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "an offloaded optimizer"),
        (f' "optimizer": {{"type": "Adam", "params": {{"lr": "auto"}}}},\n{ZERO2}', "an optimizer of the engine"),
    ],
)
def test_nothing_takes_the_place_of_states_in_bf16(tmp_path: Path, body: str, problem: str) -> None:
    said = one("DS225", found(body, job=job(tmp_path, "optimizer: adamw_bf16\n")))
    assert said.severity is Severity.ERROR
    assert problem in said.problem
    assert "DS225" not in [each.rule for each in found(body, job=job(tmp_path))]
    assert [each.rule for each in found(ZERO2, job=job(tmp_path, "optimizer: adamw_bf16\n"))] == ["DS332"]


_KEYS = ' "bf16": {"enabled": "auto", "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},\n'


@pytest.mark.parametrize(
    ("more", "words", "missing"),
    [
        ("", "above 0.0051 stay as they are; with adam_beta2 0.999 second moments never fall", "estimates"),
        ("adam_beta2: 0.95\n", "above 0.0051 stay as they are", "never fall"),
        ("optimizer: muon\nmax_grad_norm: 0\n", "estimates count fp32 here", "DS225"),
    ],
)
def test_what_master_weights_in_bf16_lose_is_said_in_numbers_of_the_job(
    tmp_path: Path, more: str, words: str, missing: str
) -> None:
    said = one("DS332", found(_KEYS + ZERO2, job=job(tmp_path, more)))
    assert words in said.effect
    assert missing not in said.effect
    if "optimizer" not in more:
        by_job = one("DS332", found(ZERO2, job=job(tmp_path, f"{more}optimizer: adamw_bf16\n")))
        assert (by_job.effect, Path(by_job.place.file).name) == (said.effect, "job.yaml")
        assert "write optimizer: adamw," in by_job.fix


def test_tensor_parallelism_excludes_hpz(tmp_path: Path) -> None:
    body = ' "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}'
    assert "zero_hpz_partition_size with tp 2" in one("DS224", found(body, job=job(tmp_path, "tp: 2\n"))).problem


def test_sequence_parallelism_under_zero_3_needs_reduce_scatter(tmp_path: Path) -> None:
    gathers = '"stage3_gather_16bit_weights_on_model_save": true'
    body = f' "zero_optimization": {{"stage": 3, "reduce_scatter": false, {gathers}}}}}'
    said = one("DS223", found(body, job=job(tmp_path, "sp: 2\n")))
    assert (said.severity, said.place.line) == (Severity.ERROR, 2)
    assert found(body, job=job(tmp_path)) == []
    assert found(body.replace("false", "true"), job=job(tmp_path, "sp: 2\n")) == []


def test_a_scaling_that_the_model_cannot_have_is_an_error(tmp_path: Path) -> None:
    scaling = "seq_len: 8192\nrope_scaling: {rope_type: yarn, factor: 4.0}\n"
    known: dict[str, Any] = {"job": job(tmp_path, scaling), "model": model("llama-3.1-8b")}
    said = one("DS905", found(ZERO2, **known))
    assert (said.severity, "llama3" in said.problem, said.fix) == (Severity.ERROR, True, "remove rope_scaling")
    assert [each.rule for each in found(ZERO2, **known | {"model": model("qwen3-8b")}) if each.rule == "DS905"] == []


def test_auto_and_equal_literals_agree(tmp_path: Path) -> None:
    body = ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "eps": "auto"}},\n' + ZERO2
    assert found(body, job=job(tmp_path)) == []


def test_two_schedules_are_told_which_one_is_used(tmp_path: Path) -> None:
    said = one("DS506", found(' "scheduler": {"type": "WarmupLR"},\n' + ZERO2, job=job(tmp_path)))
    assert said.effect == "the run uses the schedule of x.json, not the job's"


def test_an_optimizer_without_a_learning_rate_is_offered_the_jobs(tmp_path: Path) -> None:
    body = ' "optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}},\n' + ZERO2
    said = one("DS510", found(body, job=job(tmp_path)))
    assert said.severity is Severity.ERROR
    assert 'write "lr": "auto", which is learning_rate of' in said.fix
    assert said.fix.endswith("job.yaml:5:1: 1e-05")
    assert said.changes == ()


def test_a_weight_decay_of_the_job_that_the_optimizer_leaves_out_is_told(tmp_path: Path) -> None:
    body = ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n' + ZERO2
    assert (
        "job.yaml:6:1: weight_decay makes it 0.1"
        in one("DS511", found(body, job=job(tmp_path, "weight_decay: 0.1\n"))).problem
    )
    assert found(body, job=job(tmp_path)) == []


def test_accumulation_that_is_missing_is_an_error_where_the_run_ends(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",\n' + ZERO2
    for body, wanted in (
        (text, Severity.WARNING),
        (text.replace("{", '{"train_batch_size": "auto", ', 1), Severity.ERROR),
    ):
        document, _ = read(body, "x.json")
        assert document is not None
        said = one("DS403", check(Subject(document=document, is_trainers=True, job=job(tmp_path))))
        assert said.severity is wanted
        assert ("the run stops" in said.effect) == (wanted is Severity.ERROR)


def test_experts_that_are_no_leaf_module_are_found() -> None:
    body = ' "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}'
    assert "deadlock" in one("DS602", found(body, model=model("deepseek-v3"))).effect
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


def test_gradients_are_quantized_between_nodes_only() -> None:
    body = ' "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}'
    assert "unquantized" in one("DS809", found(body, hosts=hostfile.expand("a:8", None))).effect
    assert "DS809" not in [each.rule for each in found(body, hosts=hostfile.expand("a:8,b:8", None))]


@pytest.mark.parametrize(
    ("more", "is_wrong"),
    [
        ('"bf16": {"enabled": true}', True),
        ('"fp16": {"enabled": false}', True),
        ('"fp16": {"enabled": true}', False),
        ('"bf16": {"enabled": true}, "communication_data_type": "fp16"', False),
    ],
)
def test_quantized_gradients_must_be_fp16(more: str, is_wrong: bool) -> None:
    body = f' {more}, "zero_optimization": {{"stage": 3, "zero_quantized_gradients": true}}}}'
    for hosts in (hostfile.expand("a:8,b:8", None), None):
        assert ("DS810" in [each.rule for each in found(body, hosts=hosts)]) is is_wrong
    assert "DS810" not in [each.rule for each in found(body, hosts=hostfile.expand("a:8", None))]


@pytest.mark.parametrize(
    ("model", "hosts", "lost"),
    [
        ("qwen3-32b", "a:8,b:8", None),
        ("qwen3-32b", "a:8,b:8,c:8", None),  # reduced unquantized: 2 × 24 does not divide them
        ("qwen3-30b-a3b", "a:8,b:8", "mlp.experts.gate_up_proj (128 × 1536 × 2048)"),
        ("qwen3-30b-a3b", "a:8", None),
        ("qwen3-32b", "a:5,b:5", "model.embed_tokens.weight (151936 × 5120)"),
        ("gemma-3-27b", "a:8,b:8", None),  # its vision tower does not train,
    ],
)
def test_quantized_gradients_need_shapes_that_their_kernels_read(model: str, hosts: str, lost: str | None) -> None:
    body = ' "fp16": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}'
    known = {"hosts": hostfile.expand(hosts, None), "model": probe.read_model(model)}
    every = [each for each in found(body, **known) if each.rule == "DS811"]
    assert [lost is not None and lost in each.problem for each in every] == ([True] if lost else [])


@pytest.mark.parametrize(
    ("model", "values", "is_said"),
    [
        ("qwen3-30b-a3b", {}, True),
        ("qwen3-30b-a3b", {"tf32": "true"}, False),
        ("qwen3-30b-a3b", {"precision": "bf16"}, False),
        ("qwen3-30b-a3b", {"liger": "false"}, False),
        ("qwen3-8b", {}, False),
    ],
)
def test_ligers_experts_round_fp32(tmp_path: Path, model: str, values: dict[str, str], is_said: bool) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in ({"precision": "fp32", "liger": "true"} | values).items())
    every = found(ZERO2, job=job(tmp_path, text), model=probe.read_model(model))
    assert ("DS607" in [each.rule for each in every]) is is_said


def test_copies_of_experts_that_stay_without_checkpointing_are_told(tmp_path: Path) -> None:
    lines = "method: lora\nlora: {target_parameters: [%s]}\ngrad_ckpt: %s\n"
    facts = model("qwen3-30b-a3b")
    said = one("DS608", found(ZERO2, job=job(tmp_path, lines % ("experts", "false")), model=facts))
    assert (said.place.line, "54.0 GiB of GPU memory" in said.effect) == (8, True)
    for quiet in (("experts", "true"), ("", "false")):
        rules = [each.rule for each in found(ZERO2, job=job(tmp_path, lines % quiet), model=facts)]
        assert "DS608" not in rules


@pytest.mark.parametrize(
    ("model", "stage", "others", "why"),
    [
        ("qwen3-30b-a3b", 2, {}, None),
        ("qwen3-8b", 2, {}, "qwen3-8b has no experts"),
        ("qwen3-30b-a3b", 2, {"tp": 2}, "tp is above 1"),
        ("qwen3-30b-a3b", 2, {"ep": 2}, None),
        ("qwen3-30b-a3b", 3, {"method": "lora"}, "no gradient comes"),
        ("qwen3-30b-a3b", 2, {"method": "lora"}, None),
        ("qwen3-30b-a3b", 3, {"method": "lora", "grad_ckpt": "false"}, None),
    ],
)
def test_the_loss_of_routers_needs_whole_ones_and_a_gradient(
    tmp_path: Path, model: str, stage: int, others: dict[str, Any], why: str | None
) -> None:
    path = tmp_path / "job.yaml"
    values = {"model": model, "output_dir": "out", "router_aux_loss_coef": 0.01, **others}
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    config = ZERO2.replace('"stage": 2', f'"stage": {stage}')
    every = [each for each in found(config, job=read_job(path), model=probe.read_model(model)) if each.rule == "DS606"]
    assert [why is not None and why in each.problem for each in every] == ([True] if why else [])


def test_hpz_must_divide_the_gpus_of_a_node() -> None:
    body = ' "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}'
    assert "8 GPUs of a node" in one("DS801", found(body, hosts=hostfile.expand("a:8,b:8", None))).problem
    four = body.replace(": 3}}", ": 4}}")
    assert "DS801" not in [each.rule for each in found(four, hosts=hostfile.expand("a:8,b:8", None))]


def with_estimate(folder: Path, machines: Cluster, body: str, name: str = "qwen3-32b", **more: Any) -> list[Finding]:
    facts, file = model(name), job(folder, "grad_ckpt: true\n")
    needs = estimate(Workload(model=facts, cluster=machines), request_of(file.job), json.loads(HEAD + body))
    return found(body, model=facts, job=file, cluster=machines, estimate=needs, **more)


def test_what_does_not_fit_the_gpu_is_told_with_both_numbers(tmp_path: Path) -> None:
    said = one("DS802", with_estimate(tmp_path, cluster(count=8), ' "zero_optimization": {"stage": 1}}'))
    assert said.severity is Severity.ERROR
    assert "GiB on each GPU; a100-80g has 80.0 GiB, of which 72.0 GiB are planned with" in said.problem


def test_nothing_is_said_of_a_gpu_that_was_assumed(tmp_path: Path) -> None:
    assumed = replace(cluster(count=8), gpu_origin=Origin.ASSUMED)
    rules = [each.rule for each in with_estimate(tmp_path, assumed, ' "zero_optimization": {"stage": 1}}')]
    assert "DS802" not in rules


def test_what_does_not_fit_the_ram_is_told(tmp_path: Path) -> None:
    little = cluster(count=8, host_memory_bytes=64 * 2**30, host_memory_origin=Origin.GIVEN)
    body = ' "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
    said = one("DS803", with_estimate(tmp_path, little, body))
    assert "of RAM on each node, which has 64.0 GiB, of which 57.6 GiB are planned with" in said.problem
    assert (said.severity, said.fix[:12]) == (Severity.ERROR, "offload less")
    guessed = replace(little, host_memory_origin=Origin.ASSUMED)
    assert one("DS803", with_estimate(tmp_path, guessed, body)).severity is Severity.WARNING
    large = cluster(count=8, host_memory_bytes=2**40, host_memory_origin=Origin.GIVEN)
    at_load = one("DS803", with_estimate(tmp_path, large, ' "zero_optimization": {"stage": 2}}'))
    sizes = r"needs \d+ GiB of RAM on each node while the model is loaded, which has 1024 GiB, of which 921.6 GiB are "
    assert re.search(sizes, at_load.problem), at_load.problem
    assert "offload" not in at_load.fix
    assumed = replace(large, host_memory_origin=Origin.ASSUMED)
    said = one("DS803", with_estimate(tmp_path, assumed, ' "zero_optimization": {"stage": 2}}'))
    assert "which is assumed to have 1024 GiB" in said.problem
    assert said.severity is Severity.WARNING


def test_what_does_not_fit_the_ram_of_ranks_on_a_cpu_is_told(tmp_path: Path) -> None:
    body = ' "zero_optimization": {"stage": 2}}'
    known = cluster("cpu", 2, host_memory_bytes=2**35, host_memory_origin=Origin.MEASURED)
    said = one("DS802", with_estimate(tmp_path, known, body, "qwen3-8b"))
    assert "GiB for each rank; its share of the RAM is 16.0 GiB, of which 14.4 GiB are planned with" in said.problem
    assert (said.severity, said.effect) == (Severity.ERROR, "the kernel kills a rank (exit code -9)")
    assumed = replace(known, host_memory_origin=Origin.ASSUMED)
    assert "DS802" not in [each.rule for each in with_estimate(tmp_path, assumed, body, "qwen3-8b")]


def test_a_drive_that_is_too_small_is_told(tmp_path: Path) -> None:
    nvme = '{"device": "nvme", "nvme_path": "/drive"}'
    body = f' "zero_optimization": {{"stage": 3, "offload_optimizer": {nvme}, "offload_param": {nvme}}}}}'
    machines = cluster("4090", 8, nvme_path="/drive")
    assert "NVMe" in one("DS807", with_estimate(tmp_path, machines, body, free_nvme_bytes=10**9)).problem


def test_a_checkpoint_that_does_not_fit_the_disk_is_told_at_output_dir(tmp_path: Path) -> None:
    said = with_estimate(tmp_path, cluster(count=8), ' "zero_optimization": {"stage": 3}}', free_disk_bytes=10**9)
    place = one("DS804", said).place
    assert (Path(place.file).name, place.line) == ("job.yaml", 2)


DEEPCOMPILE = ' "compile": {"deepcompile": true},'


@pytest.mark.parametrize(("more", "gpu", "rules"), [("", "a100-80g", {"DS208"}), (COMPILES, "a100-80g", set()),
                                                    (COMPILES, "cpu", {"DS348"})])  # fmt: skip
def test_deepcompile_needs_the_jobs_torch_compile_and_gpus(
    tmp_path: Path, more: str, gpu: str, rules: set[str]
) -> None:
    said = found(f"{DEEPCOMPILE}{ZERO2}", job=job(tmp_path, more), cluster=cluster(gpu))
    assert {each.rule for each in said} & {"DS208", "DS348"} == rules


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ('"tensor_parallel": {"tp": {"tp_size": 2}}', "no weights"),
        ('"sequence_parallel_size": 2, "compile": {"deepcompile": true, "passes": ["autosp"]}', "not split"),
        ('"compile": {"deepcompile": true, "passes": ["autosp"]}', "never called"),
        ('"pipeline": {"stages": 2}', "not split"),
        ('"hybrid_engine": {"enabled": true}', "generation"),
        ('"data_efficiency": {"enabled": true}', "nothing reads it"),
    ],
)
def test_what_the_trainer_does_not_run_or_save_is_an_error_with_a_job(tmp_path: Path, key: str, effect: str) -> None:
    said = [each for each in found(f" {key},\n{ZERO2}", job=job(tmp_path)) if each.rule == "DS221"]
    assert said and all(each.severity is Severity.ERROR for each in said)
    assert any(effect in each.effect for each in said)


def test_sequence_parallelism_by_a_key_alone_is_an_error_with_a_job_too(tmp_path: Path) -> None:
    said = one("DS211", found(f' "sequence_parallel_size": 2,\n{ZERO2}', job=job(tmp_path)))
    assert said.severity is Severity.ERROR


def test_steps_that_the_trainer_counts_otherwise_are_told_and_offered_to_be_filled(tmp_path: Path) -> None:
    head = ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n "scheduler": {"type": '
    rest = (
        '"WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 3, "total_num_steps": 50}},\n' + ZERO2
    )
    said = one("DS421", found(head + rest, job=job(tmp_path, "max_steps: 100\n")))
    assert "job.yaml:6:1: max_steps is 100 makes it 100" in said.problem
    said = one("DS421", found(head + rest, job=job(tmp_path, "max_steps: 50\nwarmup_ratio: 0.1\n")))
    assert "max_steps is 50 (warmup_ratio 0.1) makes it 5" in said.problem
    fitting = found(head + rest, job=job(tmp_path, "max_steps: 50\nwarmup_ratio: 0.06\n"))
    assert "DS421" not in [each.rule for each in fitting]


def test_a_warm_up_of_another_length_is_told_by_the_rows_of_the_data(tmp_path: Path) -> None:
    body = (
        ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n "scheduler": {"type": "WarmupLR", "params": '
        '{"warmup_num_steps": 500}},\n' + ZERO2
    )
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 200)
    file = job(tmp_path, "data: rows.jsonl\nval_split: 0.2\nnum_train_epochs: 10\n")
    steps = counted_steps(JobContext(job=file, hosts=parse("localhost slots=2\n", "hosts")))
    said = one("DS421", found(body, job=file, counted_steps=steps))
    assert steps == 10 * 10  # 160 rows, 2 ranks × 2 × 4
    assert said.problem.endswith("data has rows for 100 steps (warmup_ratio 0.03) makes it 3")
    assert said.fix == 'write "auto" here, or warmup_steps: 500 into job.yaml'
    fitting = found(body, job=job(tmp_path, "data: rows.jsonl\nwarmup_steps: 500\n"))
    assert "DS421" not in [each.rule for each in fitting]
    wrong = one("DS421", found(body, job=job(tmp_path, "warmup_steps: 5\n")))
    assert "warmup_steps makes it 5" in wrong.problem


def test_a_schedule_of_torch_that_ends_before_the_run_is_told(tmp_path: Path) -> None:
    body = (
        ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n "scheduler": {"type": "PolynomialLR", "params": '
    )
    short = found(body + '{"total_iters": 10}},\n' + ZERO2, job=job(tmp_path, "max_steps: 100\n"))
    assert one("DS421", short).effect == "the learning rate is then 0"


def test_a_lower_end_above_the_jobs_learning_rate_is_told(tmp_path: Path) -> None:
    body = ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n "scheduler": {"type": "WarmupLR", "params": {'
    body += '"warmup_min_lr": 1e-3, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},\n' + ZERO2
    assert one("DS420", found(body, job=job(tmp_path))).problem == "warmup_min_lr is 0.001, but warmup_max_lr is 1e-05"


@pytest.mark.parametrize(
    ("lines", "rule", "line"),
    [
        ("max_steps: 5\nlogging_steps: 10\n", "DS901", 7),
        ("data: a.jsonl\neval_data: a.jsonl\n", "DS902", 7),
        ("eval_data: b.jsonl\neval_strategy: epoch\neval_steps: 5\n", "DS907", 8),
        ("eval_micro_batch: 4\n", "DS907", 6),
        ("eval_data: b.jsonl\nearly_stopping_threshold: 0.1\n", "DS907", 7),
        ("seq_len: 65536\n", "DS903", 6),
        ("precision: bf16\n", "DS904", 6),
        ("dpo: {label_smoothing: 0.1}\n", "DS908", 6),
    ],
)
def test_what_is_wrong_in_the_job_is_told_in_its_line(tmp_path: Path, lines: str, rule: str, line: int) -> None:
    said = one(rule, found(ZERO2, job=job(tmp_path, lines), model=model("qwen3-8b"), cluster=cluster("v100-32g")))
    assert (Path(said.place.file).name, said.place.line, said.severity) == ("job.yaml", line, Severity.WARNING)


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ("task: dpo\nmax_steps: 5\nstreaming: true\n", "remove streaming"),
        ("task: dpo\nsamples: {prompts: [a]}\n", "remove samples"),
        ("method: lora\nnew_tokens: [<a>]\n", "add embed_tokens, and an untied lm_head, to lora: modules_to_save"),
    ],
)
def test_a_fix_keeps_what_the_job_asks_for(tmp_path: Path, lines: str, fix: str) -> None:
    assert one("DS226", found(ZERO2, job=job(tmp_path, lines))).fix == fix


@pytest.mark.parametrize("limit", [pytest.param(limit, id=f"{limit.task}-{limit.key}") for limit in LIMITS])
def test_what_a_task_does_not_support_is_told(tmp_path: Path, limit: TaskLimit) -> None:
    task = limit.task
    others = {"loss": "fused", "packing": "true", "loss_on": "all"}
    formats = {Task.SFT: "preference", Task.PRETRAIN: "alpaca"}
    other = formats.get(task, "text") if limit.key == "data_format" else others.get(limit.key, 2)
    said = one("DS226", found(ZERO2, job=job(tmp_path, f"task: {task}\n{limit.key}: {other}\n")))
    assert (said.place.line, said.severity, said.fix) == (7, Severity.ERROR, f"write {limit.instead}")
    assert limit.why in said.problem
    fine = found(ZERO2, job=job(tmp_path, f"task: {task}\n{limit.instead}\n"))
    assert "DS226" not in [each.rule for each in fine]


@pytest.mark.parametrize("limit", WITH_ADAPTERS, ids=lambda limit: limit.key)
def test_parts_that_adapters_do_not_train_are_told(tmp_path: Path, limit: TaskLimit) -> None:
    other = str(not limit.values[0]).lower()
    said = one("DS226", found(ZERO2, job=job(tmp_path, f"method: lora\n{limit.key}: {other}\n")))
    assert said.problem.startswith(f"{limit.key} is {other}, which method lora does not support: ")
    assert "DS226" not in [each.rule for each in found(ZERO2, job=job(tmp_path, f"{limit.key}: {other}\n"))]


def test_patterns_of_frozen_parameters_beside_an_adapter_are_told(tmp_path: Path) -> None:
    said = one("DS226", found(ZERO2, job=job(tmp_path, "method: lora\nfreeze: [embed_tokens]\n")))
    assert (
        said.problem
        == "freeze is [embed_tokens], which method lora does not support: an adapter freezes all of the model"
    )
    assert said.fix == "write freeze: []"


def test_dropout_beside_adapters_of_experts_is_told_in_its_place(tmp_path: Path) -> None:
    lines = "method: lora\nlora:\n  dropout: %s\n  target_parameters: [experts]\n"
    said = one("DS226", found(ZERO2, job=job(tmp_path, lines % 0.1)))
    assert (said.place.line, said.fix) == (8, "write lora.dropout: 0.0")
    assert said.problem.startswith("lora.dropout is 0.1, which target_parameters do not support: ")
    assert "DS226" not in [each.rule for each in found(ZERO2, job=job(tmp_path, lines % 0.0))]


def test_new_tokens_that_an_adapter_would_not_train_are_told(tmp_path: Path) -> None:
    lines = "new_tokens: [<a>]\nmethod: lora\n"
    assert one("DS226", found(ZERO2, job=job(tmp_path, lines))).problem.startswith("new_tokens is [<a>], which method")
    whole = job(tmp_path, f"{lines}lora: {{modules_to_save: [embed_tokens]}}\n")
    assert "DS226" not in [each.rule for each in found(ZERO2, job=whole)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("tp: 2", "tp is 2, which samples do not support: generation was not tried with shared weights"),
        ("torch_compile: true", "torch_compile is true, which samples do not support: each length of a text"),
        ("task: dpo", "task is dpo, which samples do not support: generation was not tried with its loss"),
    ],
)
def test_samples_are_refused_where_they_were_not_tried(tmp_path: Path, line: str, problem: str) -> None:
    asked = job(tmp_path, f"{line}\nsamples: {{prompts: [Who are you?], generate_every: 5}}\n")
    assert one("DS226", found(ZERO2, job=asked)).problem.startswith(problem)


def test_checkpoints_without_weights_are_told(tmp_path: Path) -> None:
    asked = job(tmp_path, "save_only_model: true\n")
    zero3 = '"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": %s}}'
    said = one("DS910", found(zero3 % "false", job=asked))
    assert (said.place.line, said.severity) == (6, Severity.ERROR)
    assert "DS910" not in [each.rule for each in found(zero3 % "true", job=asked)]


@pytest.mark.parametrize(
    ("lines", "place", "problem"),
    [
        ("freeze:\n- embed\n- mlpp\n", (8, 3), 'freeze has "mlpp", which is in no name of a parameter'),
        ("method: lora\nlora:\n  targets: [q_proj, kproj]\n", (8, 21), 'lora: targets has "kproj", but no module'),
        ("method: lora\nlora:\n  targets: [norm]\n", (8, 3), "no linear layer or embedding of qwen3-8b is named norm"),
    ],
)
def test_names_that_the_model_does_not_have_are_errors(
    tmp_path: Path, lines: str, place: tuple[int, int], problem: str
) -> None:
    facts = model("qwen3-8b")
    said = one("DS227", found(ZERO2, job=job(tmp_path, lines), model=facts))
    assert (said.place.line, said.place.column, said.severity) == (*place, Severity.ERROR)
    assert said.problem.startswith(problem)


@pytest.mark.parametrize(
    ("name", "lora", "problem", "fix"),
    [
        ("qwen3-8b", "{target_parameters: [experts]}", "has no stacked weights of experts", "name modules as targets"),
        (
            "qwen3-30b-a3b",
            "{target_parameters: [down_proj, gate_proj]}",
            'target_parameters has "gate_proj", but no stacked weight of experts is named so',
            "write experts (all), or some of experts.gate_up_proj, experts.down_proj",
        ),
        ("qwen3-30b-a3b", "{targets: []}", "targets is empty, so that nothing gets an adapter", "write some of"),
        ("qwen3-30b-a3b", "{targets: [], target_parameters: [experts]}", "", ""),
        ("qwen3-30b-a3b", "{targets: [q_proj, gate_proj]}", '"gate_proj", which PEFT takes for experts', "remove it;"),
        ("deepseek-v3", "{targets: [mlp.down_proj]}", '"mlp.down_proj", which PEFT takes for experts', "remove it;"),
        ("qwen3-vl-30b-a3b", "{targets: [q_proj, down_proj]}", "no module of the model is named so", "remove it;"),
    ],
)
def test_experts_that_the_model_does_not_have_are_errors(
    tmp_path: Path, name: str, lora: str, problem: str, fix: str
) -> None:
    said = found(ZERO2, job=job(tmp_path, f"method: lora\nlora: {lora}\n"), model=model(name))
    told = [each for each in said if each.rule == "DS227"]
    assert [(problem in each.problem, each.fix.startswith(fix)) for each in told] == [(True, True)] * bool(problem)


def test_names_that_cannot_be_checked_are_told_once(tmp_path: Path) -> None:
    asked = job(tmp_path, "freeze: [mlp]\ntrain_only: [norm]\n")
    said = one("DS227", found(ZERO2, job=asked))
    assert said.severity is Severity.WARNING
    assert said.problem == (
        "freeze, train_only cannot be checked: the names of Qwen/Qwen3-8B's parameters are not known here"
    )
    assert "DS227" not in [each.rule for each in found(ZERO2, job=job(tmp_path))]
    experts = job(tmp_path, "method: lora\nlora: {target_parameters: [experts]}\n")
    assert one("DS227", found(ZERO2, job=experts)).problem.startswith("lora: target_parameters cannot be checked: ")


def test_keys_of_images_for_a_language_model_are_told(tmp_path: Path) -> None:
    asked = job(tmp_path, "max_pixels: 4096\nfreeze_vision_tower: false\n")
    told = [each for each in found(ZERO2, job=asked, model=model("qwen3-8b")) if each.rule == "DS909"]
    assert [each.place.line for each in told] == [6, 7]
    assert "DS909" not in [each.rule for each in found(ZERO2, job=asked, model=model("qwen3-vl-8b"))]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen3-vl-8b", []),
        ("gemma-3-12b", [("DS911", 6), ("DS911", 7)]),
        ("qwen3-8b", [("DS909", 6), ("DS909", 7), ("DS909", 8)]),
    ],
)
def test_keys_of_videos_are_told_for_a_model_that_does_not_train_on_them(
    tmp_path: Path, name: str, told: list[tuple[str, int]]
) -> None:
    asked = job(tmp_path, "video_fps: 1.0\nvideo_maxlen: 16\nmax_pixels: 4096\n")
    findings = found(ZERO2, job=asked, model=model(name))
    assert [(each.rule, each.place.line) for each in findings if each.rule in ("DS909", "DS911")] == told


@pytest.mark.parametrize(
    "limit",
    [limit for limit in CPU_LIMITS if limit.key != "offload" and not limit.is_of_engine],
    ids=lambda limit: limit.value,
)
def test_what_a_cpu_does_not_run_is_told(tmp_path: Path, limit: CpuLimit) -> None:
    asked = job(tmp_path, f"{limit.key}: {limit.value}\n")
    said = one(
        "DS904", found(ZERO2, job=asked, model=model("qwen3-0.6b"), cluster=cluster("cpu", 2, host_memory_bytes=2**38))
    )
    assert limit.why in said.effect
    assert said.fix == f"write {limit.key}: {limit.instead}"


@pytest.mark.parametrize(
    "limit", [limit for limit in CPU_LIMITS if limit.is_of_engine], ids=lambda limit: f"{limit.key} {limit.value}"
)
def test_what_the_engine_does_not_run_on_a_cpu_is_an_error(tmp_path: Path, limit: CpuLimit) -> None:
    section, _, key = limit.key.partition(".")
    value = "true" if limit.value == "true" else f'"{limit.value}"'
    body = ZERO2.replace('"stage": 2', f'"stage": 3, "{key}": {value}')
    if section == "optimizer":
        body = f'"optimizer": {{"{key}": {value}}},\n{ZERO2}'
    known = cluster("cpu", 2, host_memory_bytes=2**38)
    asked = job(tmp_path, "precision: fp32\n")
    said = one("DS904", found(body, job=asked, model=model("qwen3-0.6b"), cluster=known))
    assert said.pointer == f"/{section}/{key}"
    assert said.severity is (Severity.WARNING if limit.unless not in ("", OFFLOADED) else Severity.ERROR)
    assert limit.why in said.effect
    if limit.unless == OFFLOADED:
        offloaded = body.replace('"stage": 2', f'"stage": 2, {OFFLOADS}')
        findings = found(offloaded, job=asked, model=model("qwen3-0.6b"), cluster=known)
        assert "DS904" not in {each.rule for each in findings}


def test_qlora_trains_on_a_cpu(tmp_path: Path) -> None:
    asked = job(tmp_path, "method: qlora\nprecision: fp32\n")
    known = cluster("cpu", 2, host_memory_bytes=2**38)
    assert "DS904" not in {each.rule for each in found(ZERO2, job=asked, model=model("qwen3-0.6b"), cluster=known)}


YARN = "rope_scaling: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32768}\n"


def test_positions_that_reach_the_length_are_in_order(tmp_path: Path) -> None:
    assert not found(ZERO2, job=job(tmp_path, f"seq_len: 65536\n{YARN}"), model=model("qwen3-8b"))


@pytest.mark.parametrize(
    ("seq_len", "name", "problem", "fix"),
    [
        (65537, "qwen3-8b", "reaches 65536 tokens, and seq_len is 65537", "rope_scaling and write seq_len: 40960, or"),
        (65536, "llama-3.1-8b", "already has rope_type llama3", "remove rope_scaling"),
        (32768, "phi-4", "takes no rope_type but longrope", "remove rope_scaling and write seq_len: 16384"),
    ],
)
def test_positions_that_cannot_be_are_an_error_in_their_line(
    tmp_path: Path, seq_len: int, name: str, problem: str, fix: str
) -> None:
    said = one("DS905", found(ZERO2, job=job(tmp_path, f"seq_len: {seq_len}\n{YARN}"), model=model(name)))
    assert (said.place.line, said.severity) == (7, Severity.ERROR)
    assert problem in said.problem
    assert fix in str(said.fix)


def test_a_length_beyond_says_which_line_to_write(tmp_path: Path) -> None:
    said = one("DS903", found(ZERO2, job=job(tmp_path, "seq_len: 65536\n"), model=model("qwen3-8b")))
    assert str(said.fix).endswith(YARN.strip())


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("localhost", "127.0.0.1"), 1),
        (("node1", "node1.cluster.example", "node2"), 1),
        (("me@node1", "node1"), 0),
        (("10.0.0.1", "10.0.0.2"), 0),
        (("127.0.0.2", "127.0.0.3"), 0),
        (("node1.east.example", "node1.west.example"), 0),
    ],
)
def test_two_names_of_one_machine_are_found(names: tuple[str, ...], count: int) -> None:
    hosts = hostfile.parse("".join(f"{name} slots=1\n" for name in names), "hostfile")
    said = [each for each in of_hosts(hosts, None) if "two names" in each.problem]
    assert len(said) == count
    assert all(each.severity is Severity.ERROR and each.place.line == 2 for each in said)


def test_slots_are_counted_in_words_that_agree() -> None:
    hosts = hostfile.parse("node1 slots=1\n", "hostfile")
    assert of_hosts(hosts, 8)[0].problem == "1 slot in total, but the plan is for 8 GPUs"


def test_a_line_of_a_hostfile_that_is_wrong_is_mended_by_the_line_to_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as error:
        hostfile.parse("node1 slot=8\n", "hostfile")
    finding = of_hostfile(error.value)[0]
    assert finding.place == Place(file="hostfile", line=1, column=7)
    assert (finding.problem, finding.fix) == ("`slot=8` is not `slots=8`", "write `node1 slots=8`")


def test_a_hostfile_that_cannot_be_read_makes_no_machine(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("node1 slot=8\n")
    file = job(tmp_path, "hostfile: hostfile\n")
    context = job_context(file, None)
    assert (context.hosts, context.cluster) == (None, None)
    assert [finding.rule for finding in hostfile_findings.findings(file, None)] == ["DS805"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "lr_scheduler_type: linear\nlr_scheduler_kwargs: {power: 2}\n",
            'linear has no parameter "power"; it takes none',
        ),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {min_lr: 0}\n", "it takes lr_end, power"),
        ("lr_scheduler_type: cosine_with_min_lr\n", "cosine_with_min_lr needs min_lr or min_lr_rate"),
    ],
)
def test_a_schedule_gets_its_own_parameters(tmp_path: Path, lines: str, problem: str) -> None:
    said = one("DS906", found(ZERO2, job=job(tmp_path, lines)))
    assert problem in said.problem
    assert said.severity is Severity.ERROR
    good = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
    assert not [each for each in found(ZERO2, job=job(tmp_path, good)) if each.rule == "DS906"]
