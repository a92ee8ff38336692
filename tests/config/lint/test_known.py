"""Rules that ask for a job, a model or machines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Task
from dstrain.config.lint.engine import check, read
from dstrain.config.lint.rule import JobContext, Subject
from dstrain.errors import Place
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus, hostfile
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import parse
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.findings import Finding, Severity
from dstrain.job.file import JobFile, read_job
from dstrain.job.limits import CPU_LIMITS, LIMITS, OFFLOADED, WITH_ADAPTERS, CpuLimit, TaskLimit
from dstrain.launch.prepare.checks import OF_HOSTFILE, findings
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
    """Returns lint's findings for a configuration with this body, given known facts."""
    document, problems = read(HEAD + body, "x.json")
    assert document is not None, problems
    return check(Subject(document=document, is_trainers=True, **known))


def one(rule: str, findings: list[Finding]) -> Finding:
    (finding,) = [each for each in findings if each.rule == rule]
    return finding


OFFLOADS = '"offload_optimizer": {"device": "cpu"}'
ZERO2 = ' "zero_optimization": {"stage": 2}}'


def zero(stage: int, *lines: str) -> str:
    """Returns the end of a configuration with these lines in its zero_optimization."""
    settings = ", ".join((f'"stage": {stage}', *lines))
    return f' "zero_optimization": {{{settings}}}}}'


GATHERS = '"stage3_gather_16bit_weights_on_model_save": true'
ZERO3 = zero(3, GATHERS)
QGZ = zero(3, '"zero_quantized_gradients": true')
QWZ = zero(3, '"zero_quantized_weights": true')
FP16 = ' "fp16": {"enabled": true},\n'
ADAMW = ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},\n'
DEEPCOMPILE = ' "compile": {"deepcompile": true},'
YARN = "rope_scaling: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32768}\n"
EXPERTS = "method: lora\nlora: {target_parameters: [experts]}\n"
MOE = "qwen3-30b-a3b"
E, W, N = Severity.ERROR, Severity.WARNING, Severity.INFO


@dataclass(frozen=True, kw_only=True)
class Known:
    """A finding that asks for a job, a model or machines, and other cases in which its rule is silent."""

    rule: str
    severity: Severity
    says: tuple[str, ...] = ()
    """Parts of its problem, effect and fix."""
    at: int | str = ""
    """Its line in job.yaml, or its pointer in ds_config.json."""
    body: str = ZERO2
    lines: str | None = None
    """Lines of the job; the first one is line 6. None: no job."""
    model: str | None = None
    gpu: str | None = None
    hosts: str | None = None
    silent: tuple[dict[str, Any], ...] = ()
    """Changes of the case with which the rule says nothing."""

    def findings(self, folder: Path) -> list[Finding]:
        """Returns the findings of the rule."""
        known = {
            "job": None if self.lines is None else job(folder, self.lines),
            "model": self.model and probe.read_model(self.model),
            "cluster": self.gpu and cluster(self.gpu, 8, **({"host_memory_bytes": 2**38} if self.gpu == "cpu" else {})),
            "hosts": self.hosts and hostfile.expand(self.hosts, None),
        }
        return [each for each in found(self.body, **known) if each.rule == self.rule]


# fmt: off
KNOWN = (
    Known(rule="DS208", severity=W, body=DEEPCOMPILE + ZERO2, lines="", gpu="a100-80g",
          silent=({"lines": COMPILES}, {"lines": COMPILES, "gpu": "cpu"})),
    Known(rule="DS210", severity=N, body=zero(3, '"leaf_module": {"classes": ["Bogus"]}'), model=MOE,
          at="/zero_optimization/leaf_module/classes/0", says=("Qwen3MoeSparseMoeBlock",)),
    Known(rule="DS211", severity=E, body=f' "sequence_parallel_size": 2,\n{ZERO2}', lines=""),
    *(Known(rule="DS221", severity=E, body=f" {key},\n{ZERO2}", lines="", says=(effect,)) for key, effect in (
        ('"tensor_parallel": {"tp": {"tp_size": 2}}', "no weights"),
        ('"sequence_parallel_size": 2, "compile": {"deepcompile": true, "passes": ["autosp"]}', "not split"),
        ('"compile": {"deepcompile": true, "passes": ["autosp"]}', "never called"),
        ('"pipeline": {"stages": 2}', "not split"),
        ('"hybrid_engine": {"enabled": true}', "generation"),
        ('"data_efficiency": {"enabled": true}', "nothing reads it"))),
    Known(rule="DS223", severity=E, body=zero(3, '"reduce_scatter": false', GATHERS), lines="sp: 2\n",
          at="/zero_optimization/reduce_scatter",
          silent=({"lines": ""}, {"body": zero(3, '"reduce_scatter": true', GATHERS)})),
    Known(rule="DS224", severity=E, body=zero(3, '"zero_hpz_partition_size": 2'), lines="tp: 2\n",
          says=("zero_hpz_partition_size with tp 2",)),
    *(Known(rule="DS225", severity=E, body=body, lines="optimizer: adamw_8bit\n", at=at,
            silent=({"lines": ""}, {"body": ZERO2})) for body, at in (
        (ADAMW + ZERO2, "/optimizer"), (zero(2, OFFLOADS), "/zero_optimization/offload_optimizer"))),
    *(Known(rule="DS225", severity=E, body=body, lines="optimizer: adamw_bf16\n", says=(problem,),
            silent=({"lines": ""}, {"body": ZERO2})) for body, problem in (
        (zero(0), "optimizer is adamw_bf16 with ZeRO-0"),
        (' "bf16": {"bf16_optimizer_states": false},\n' + ZERO2, "bf16_optimizer_states is false"),
        (' "data_types": {"grad_accum_dtype": "fp32"},\n' + zero(1), "fp32 sums with ZeRO-1"),
        (zero(2, OFFLOADS), "an offloaded optimizer"),
        (ADAMW + ZERO2, "an optimizer of the engine"))),
    *(Known(rule="DS226", severity=E, lines=lines, says=(fix,)) for lines, fix in (
        ("task: dpo\nmax_steps: 5\nstreaming: true\n", "remove streaming"),
        ("streaming: true\nmax_steps: 5\ndata: [{path: a.jsonl, max_samples: 5}]\n", "max_samples is 5, which"),
        ("streaming: true\n", "max_steps is null, which streaming does not support"),
        ("streaming: true\nmax_steps: 5\nval_split: 0.1\n", "val_split is 0.1, which streaming does not support"),
        ("task: dpo\nsamples: {prompts: [a]}\n", "remove samples"),
        ("method: lora\nnew_tokens: [<a>]\n", "add embed_tokens, and an untied lm_head, to lora: modules_to_save"))),
    Known(rule="DS226", severity=E, lines="method: lora\nfreeze: [embed_tokens]\n", at=7,
          says=("freeze is [embed_tokens], which method lora does not support: an adapter freezes all of the model",
                "write freeze: []")),
    Known(rule="DS226", severity=E, lines="method: lora\nlora:\n  dropout: 0.1\n  target_parameters: [experts]\n", at=8,
          says=("lora.dropout is 0.1, which target_parameters do not support: ", "write lora.dropout: 0.0"),
          silent=({"lines": "method: lora\nlora:\n  dropout: 0.0\n  target_parameters: [experts]\n"},)),
    Known(rule="DS226", severity=E, lines="new_tokens: [<a>]\nmethod: lora\n",
          says=("new_tokens is [<a>], which method",),
          silent=({"lines": "new_tokens: [<a>]\nmethod: lora\nlora: {modules_to_save: [embed_tokens]}\n"},)),
    *(Known(rule="DS226", severity=E, lines=f"{line}\nsamples: {{prompts: [Who are you?], generate_every: 5}}\n",
            says=(f"{line.replace(':', ' is')}, which samples do not support: {why}",)) for line, why in (
        ("tp: 2", "generation was not tried with shared weights"),
        ("torch_compile: true", "each length of a text"),
        ("task: dpo", "generation was not tried with its loss"))),
    *(Known(rule="DS227", severity=E, lines=lines, model="qwen3-8b", says=(said,), at=line) for lines, line, said in (
        ("freeze:\n- embed\n- mlpp\n", 8, 'freeze has "mlpp", which is in no name of a parameter'),
        ("method: lora\nlora:\n  targets: [q_proj, kproj]\n", 8, 'lora: targets has "kproj", but no module'),
        ("method: lora\nlora:\n  targets: [norm]\n", 8, "no linear layer or embedding of qwen3-8b is named norm"))),
    Known(rule="DS348", severity=E, body=DEEPCOMPILE + ZERO2, lines=COMPILES, gpu="cpu",
          silent=({"lines": ""}, {"gpu": "a100-80g"})),
    Known(rule="DS420", severity=E, lines="", says=("warmup_min_lr is 0.001, but warmup_max_lr is 1e-05",),
          body=ADAMW + ' "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": "auto", '
                       '"warmup_num_steps": "auto"}},\n' + ZERO2),
    Known(rule="DS421", severity=E, lines="max_steps: 100\n", says=("the learning rate is then 0",),
          body=ADAMW + ' "scheduler": {"type": "PolynomialLR", "params": {"total_iters": 10}},\n' + ZERO2),
    Known(rule="DS506", severity=N, body=' "scheduler": {"type": "WarmupLR"},\n' + ZERO2, lines="",
          says=("the run uses the schedule of x.json, not the job's",)),
    Known(rule="DS510", severity=E, lines="",
          body=' "optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}},\n' + ZERO2,
          says=('write "lr": "auto", which is learning_rate of', "job.yaml:5:1: 1e-05")),
    Known(rule="DS511", severity=E, body=ADAMW + ZERO2, lines="weight_decay: 0.1\n",
          says=("job.yaml:6:1: weight_decay makes it 0.1",), silent=({"lines": ""},)),
    Known(rule="DS602", severity=W, body=ZERO3, model="deepseek-v3", says=("deadlock",), silent=({"model": MOE},)),
    Known(rule="DS603", severity=E, body=zero(2, '"stage3_prefetch_bucket_size": "auto"'), model="qwen3-vl-30b-a3b",
          silent=({"model": "qwen3-8b"},)),
    Known(rule="DS604", severity=W, body=FP16 + ZERO2, model="qwen3-8b", gpu="a100-80g", says=('write "bf16"',),
          silent=({"gpu": "v100-32g"},)),
    Known(rule="DS605", severity=N, body=ZERO3, lines="method: lora\ngrad_ckpt: true\n", says=("use_reentrant",),
          silent=({"lines": "method: lora\ngrad_ckpt: false\n"},)),
    *(Known(rule="DS606", severity=E, body=body, lines=f"router_aux_loss_coef: 0.01\n{more}", model=name, says=(why,),
            silent=({"model": MOE, "lines": "router_aux_loss_coef: 0.01\nep: 2\n"},
                    {"model": MOE, "body": ZERO2, "lines": "router_aux_loss_coef: 0.01\nmethod: lora\n"},
                    {"model": MOE, "lines": "router_aux_loss_coef: 0.01\nmethod: lora\ngrad_ckpt: false\n"}))
      for name, body, more, why in (
        ("qwen3-8b", ZERO2, "", "qwen3-8b has no experts"),
        (MOE, ZERO2, "tp: 2\n", "tp is above 1"),
        (MOE, zero(3), "method: lora\n", "no gradient comes"))),
    Known(rule="DS607", severity=W, lines="precision: fp32\nliger: true\n", model=MOE,
          silent=({"lines": "precision: fp32\nliger: true\ntf32: true\n"}, {"lines": "precision: bf16\nliger: true\n"},
                  {"lines": "precision: fp32\nliger: false\n"}, {"model": "qwen3-8b"})),
    Known(rule="DS608", severity=W, lines=EXPERTS + "grad_ckpt: false\n", model=MOE, at=8,
          says=("54.0 GiB of GPU memory",),
          silent=({"lines": EXPERTS + "grad_ckpt: true\n"}, {"lines": "method: lora\ngrad_ckpt: false\n"})),
    Known(rule="DS701", severity=W, model="qwen3-0.6b",
          body=' "bf16": {"enabled": "auto"},' + zero(2, '"reduce_bucket_size": 700000000'),
          says=("more than the 596.0 M parameters of the model", "2.41 GiB of each GPU")),  # the bucket, and a copy
    Known(rule="DS801", severity=E, body=zero(3, '"zero_hpz_partition_size": 3'), hosts="a:8,b:8",
          says=("8 GPUs of a node",), silent=({"body": zero(3, '"zero_hpz_partition_size": 4')},)),
    Known(rule="DS809", severity=W, body=QGZ, hosts="a:8", says=("unquantized",), silent=({"hosts": "a:8,b:8"},)),
    *(Known(rule="DS810", severity=E, body=f' "{precision}": {{"enabled": {on}}},{QGZ}', hosts=hosts,
            silent=({"hosts": "a:8"}, {"body": FP16 + QGZ},
                    {"body": f' "bf16": {{"enabled": true}}, "communication_data_type": "fp16",{QGZ}'}))
      for precision, on in (("bf16", "true"), ("fp16", "false")) for hosts in ("a:8,b:8", None)),
    *(Known(rule="DS811", severity=E, body=FP16 + QGZ, model=name, hosts=hosts, says=(lost,),
            silent=({"model": "qwen3-32b", "hosts": "a:8,b:8"}, {"hosts": "a:8"},
                    {"model": "qwen3-32b", "hosts": "a:8,b:8,c:8"},  # reduced unquantized: 2 × 24 does not divide them
                    {"model": "gemma-3-27b", "hosts": "a:8,b:8"}))  # its vision tower does not train
      for name, hosts, lost in ((MOE, "a:8,b:8", "mlp.experts.gate_up_proj (128 × 1536 × 2048)"),
                                ("qwen3-32b", "a:5,b:5", "model.embed_tokens.weight (151936 × 5120)"))),
    Known(rule="DS813", severity=E, body=QWZ, lines="method: qlora\n", model="qwen3-8b", gpu="a100-80g",
          says=("weights that are in 4 bits already", "goes wrong without an error"),
          silent=({"lines": "method: lora\n"}, {"body": zero(2, '"zero_quantized_weights": true')}, {"model": None})),
    Known(rule="DS813", severity=E, body=QWZ, model="gemma-3-27b", gpu="a100-80g",
          says=("eight elements at a time", "stops at its first step"), silent=({"gpu": None}, {"model": MOE})),
    *(Known(rule=rule, severity=W, lines=lines, at=line, model="qwen3-8b", gpu="v100-32g") for lines, rule, line in (
        ("max_steps: 5\nlogging_steps: 10\n", "DS901", 7),
        ("data: a.jsonl\neval_data: a.jsonl\n", "DS902", 7),
        ("eval_data: b.jsonl\neval_strategy: epoch\neval_steps: 5\n", "DS907", 8),
        ("eval_micro_batch: 4\n", "DS907", 6),
        ("eval_data: b.jsonl\nearly_stopping_threshold: 0.1\n", "DS907", 7),
        ("precision: bf16\n", "DS904", 6),
        ("dpo: {label_smoothing: 0.1}\n", "DS908", 6))),
    Known(rule="DS903", severity=W, lines="seq_len: 65536\n", model="qwen3-8b", at=6, says=(YARN.strip(),),
          silent=({"lines": f"seq_len: 65536\n{YARN}"},)),
    *(Known(rule="DS905", severity=E, lines=f"seq_len: {length}\n{YARN}", model=name, at=7, says=tuple(says),
            silent=({"model": "qwen3-8b", "lines": f"seq_len: 65536\n{YARN}"},)) for length, name, *says in (
        (65537, "qwen3-8b", "reaches 65536 tokens, and seq_len is 65537", "rope_scaling and write seq_len: 40960, or"),
        (65536, "llama-3.1-8b", "already has rope_type llama3", "remove rope_scaling"),
        (32768, "phi-4", "takes no rope_type but longrope", "remove rope_scaling and write seq_len: 16384"))),
    *(Known(rule="DS906", severity=E, lines=lines, says=(problem,),
            silent=({"lines": "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"},))
      for lines, problem in (
        ("lr_scheduler_type: linear\nlr_scheduler_kwargs: {power: 2}\n",
         'linear has no parameter "power"; it takes none'),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {min_lr: 0}\n", "it takes lr_end, power"),
        ("lr_scheduler_type: cosine_with_min_lr\n", "cosine_with_min_lr needs min_lr or min_lr_rate"))),
    *(Known(rule="DS909", severity=W, lines=f"{line}\n", model="qwen3-8b", at=6, silent=({"model": "qwen3-vl-8b"},))
      for line in ("max_pixels: 4096", "freeze_vision_tower: false", "video_fps: 1.0", "video_maxlen: 16")),
    *(Known(rule="DS911", severity=W, lines=f"{line}\n", model="gemma-3-12b", at=6,
            silent=({"model": "qwen3-vl-8b"}, {"model": "qwen3-8b"}, {"lines": "max_pixels: 4096\n"}))
      for line in ("video_fps: 1.0", "video_maxlen: 16")),
    Known(rule="DS904", severity=E, lines="liger: true\nprecision: fp32\n", model="qwen3-0.6b", gpu="cpu",
          silent=({"lines": "method: qlora\nprecision: fp32\n"},)),
    Known(rule="DS910", severity=E, body=zero(3, GATHERS.replace("true", "false")), at=6,
          lines="save_only_model: true\n",
          silent=({"body": ZERO3},)),
)
# fmt: on


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.rule)
def test_a_rule_finds_its_case_and_no_other(tmp_path: Path, case: Known) -> None:
    texts = {f"{each.problem}\n{each.effect}\n{each.fix}": each for each in case.findings(tmp_path)}
    [said] = [each for text, each in texts.items() if all(part in text for part in case.says)]
    assert said.severity is case.severity
    if isinstance(case.at, int):
        assert (Path(said.place.file).name, said.place.line) == ("job.yaml", case.at)
    elif case.at:
        assert said.pointer == case.at
    assert [change for change in case.silent if replace(case, **change).findings(tmp_path)] == []


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


def test_auto_and_equal_literals_agree(tmp_path: Path) -> None:
    body = ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "eps": "auto"}},\n' + ZERO2
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
    assert (
        "offloaded states take" in one("DS807", with_estimate(tmp_path, machines, body, free_nvme_bytes=10**9)).problem
    )


def test_a_checkpoint_that_does_not_fit_the_disk_is_told_at_output_dir(tmp_path: Path) -> None:
    said = with_estimate(tmp_path, cluster(count=8), ' "zero_optimization": {"stage": 3}}', free_disk_bytes=10**9)
    place = one("DS804", said).place
    assert (Path(place.file).name, place.line) == ("job.yaml", 2)


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
    assert said.severity is (Severity.WARNING if limit.unless else Severity.ERROR)
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
def test_two_names_of_one_machine_are_found(tmp_path: Path, names: tuple[str, ...], count: int) -> None:
    hosts = hostfile.parse("".join(f"{name} slots=1\n" for name in names), "hostfile")
    context = JobContext(job=job(tmp_path, "hostfile: hostfile\n"), hosts=hosts)
    said = [each for each in findings(OF_HOSTFILE[1:], context) if "two names" in each.problem]
    assert len(said) == count
    assert all(each.severity is Severity.ERROR and each.place.line == 2 for each in said)


def test_slots_are_counted_in_words_that_agree(tmp_path: Path) -> None:
    hosts = hostfile.parse("node1 slots=1\n", "hostfile")
    context = JobContext(job=job(tmp_path, "hostfile: hostfile\n"), hosts=hosts, planned=cluster())
    (found,) = findings(OF_HOSTFILE[1:], context)
    assert (found.rule, found.problem) == ("DS806", "1 slot in total, but the plan is for 8 GPUs")


def test_a_line_of_a_hostfile_that_is_wrong_is_mended_by_the_line_to_write(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("node1 slot=8\n")
    (finding,) = findings(OF_HOSTFILE, JobContext(job=job(tmp_path, "hostfile: hostfile\n")))
    assert finding.place == Place(file=str(tmp_path / "hostfile"), line=1, column=7)
    assert (finding.problem, finding.fix) == ("`slot=8` is not `slots=8`", "write `node1 slots=8`")


def test_a_hostfile_that_cannot_be_read_makes_no_machine(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("node1 slot=8\n")
    file = job(tmp_path, "hostfile: hostfile\n")
    context = job_context(file, None)
    assert (context.hosts, context.cluster) == (None, None)
    assert [finding.rule for finding in findings(OF_HOSTFILE, context)] == ["DS805"]
