"""Whatever the planner refuses, `lint` and `run` refuse too: the two tables of constraints are walked together."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from dstrain.choices import Offload
from dstrain.config.lint.engine import check, read
from dstrain.config.lint.rule import JobContext, Subject
from dstrain.config.resolve_auto import GATHERS
from dstrain.errors import Place
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.workload import Workload
from dstrain.findings import errors
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare.checks import COMBINATIONS, DATA, findings
from dstrain.launch.prepare.lint_job import estimated, subject_of
from dstrain.plan.configuration import DEFAULTS, Configuration, changed, choices
from dstrain.plan.search.rules import RULES, broken
from tests.plan.search.test_search_space import BROKEN, workload_of

FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
UNREFUSED = {
    "ratio needs an optimizer in RAM": "DeepSpeed does not read the ratio",
    "CPU optimizer is Adam": "no job trains with Lion; DS225 reports the optimizers that one can have",
    "hpZ keeps its copy on the GPU": "it trains, and saves nothing",
    "every n-th layer needs checkpoints": "it has no effect",
    "every n-th layer of n or more": "it trains, and recomputes one layer",
    "layers are counted in the decoder": "it trains, and recomputes other layers than the planner counts",
}
"""Rules of the planner that a run does not refuse → the reason."""


def config_of(c: Configuration) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of choices, in the order in which a person would write it."""
    zero: dict[str, Any] = {"stage": c.zero.stage, GATHERS: True}
    if c.zero.is_offloaded or c.zero.offload_ratio < 1:
        device = "nvme" if c.zero.offload is Offload.NVME else "cpu" if c.zero.is_offloaded else "none"
        zero["offload_optimizer"] = {"device": device, "ratio": c.zero.offload_ratio}
    if c.zero.offloads_params:
        zero["offload_param"] = {"device": "nvme" if c.zero.offload is Offload.NVME else "cpu"}
    if c.zero.hpz > 1:
        zero["zero_hpz_partition_size"] = c.zero.hpz
    if c.zero.qwz:
        zero["zero_quantized_weights"] = True
    config = dict.fromkeys(FILLED, "auto") | {"bf16": {"enabled": "auto"}, "zero_optimization": zero}
    if c.step.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": str(c.step.grad_accum_dtype)}
    return config


def refused_by(workload: Workload, changes: dict[str, Any]) -> set[str]:
    """Returns the lint rules that find an error in the files of a configuration."""
    configuration = changed(DEFAULTS, **changes)
    text = json.dumps(config_of(configuration))
    values = {name: choice.of(configuration) for name, choice in choices().items()}
    job = Job(model="m", output_dir="o", **{f.name: values[f.name] for f in fields(Job) if f.name in values})
    file = JobFile(job=job, locate=lambda keys: Place(file="job.yaml", line=1, column=1))
    hosts = Hosts(hosts=(Host(name="a", slots=8), Host(name="b", slots=8)), name="hosts")
    document, problems = read(text, "ds_config.json")
    assert document is not None, problems
    context = JobContext(job=file, hosts=hosts, model=workload.model, cluster=workload.cluster)
    subject = subject_of(context, document)
    return {finding.rule for finding in errors([*check(subject), *findings(COMBINATIONS, subject)])}


@pytest.mark.parametrize(("name", "model", "changes"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_run_refuses_what_the_planner_does(name: str, model: str, changes: dict[str, Any]) -> None:
    (reports,) = [rule.lint or DATA for rule in RULES if rule.name == name]
    found = refused_by(workload_of(name, model), changes)
    assert (reports in found) == (name not in UNREFUSED), found


OWN_PARALLELISM = {
    "DS321": {"EP and hpZ", "EP and offload", "EP alone"},
    "DS324": {"SP and AutoTP"},
    "DS340": {"EP alone"},
}
"""Lint rules about parallelism that a ds_config.json asks for without a job → the planner's rules that say the same."""


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("offload", [Offload.NONE, Offload.OPTIMIZER, Offload.NVME])
@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("ep", "hpz"), [(1, 1), (1, 8), (4, 1), (4, 8)])
def test_a_files_own_parallelism_is_refused_as_the_planner_refuses_it(
    stage: int, offload: Offload, sp: int, tp: int, ep: int, hpz: int
) -> None:
    configuration = changed(DEFAULTS, zero_stage=stage, offload=offload, sp=sp, tp=tp, ep=ep, hpz=hpz)
    config = config_of(configuration)
    config |= {"sequence_parallel_size": sp} if sp > 1 else {}
    config |= {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    config |= {"expert_parallel": {"enabled": True, "autoep_size": ep}} if ep > 1 else {}
    document, _ = read(json.dumps(config), "ds_config.json")
    assert document is not None
    reported = {found.rule for found in check(Subject(document=document, is_trainers=False))} & OWN_PARALLELISM.keys()
    workload = workload_of("", "qwen3-30b-a3b")
    wrong = {rule.name for rule in broken(workload, configuration)}
    assert all(OWN_PARALLELISM[rule] & wrong for rule in reported)
    # below ZeRO-3, AutoEP's own check is not made; AutoEP beside AutoTP alone was not tried, and DeepSpeed allows it
    told = {"SP and AutoTP", *(OWN_PARALLELISM["DS321"] - {"EP alone"} if stage == 3 else ())}
    if offload is not Offload.NVME:
        told -= {"EP and offload"}
    for name in told & wrong:
        assert any(name in names for rule, names in OWN_PARALLELISM.items() if rule in reported), name
    assert ("EP alone" in wrong and stage == 3 and sp > 1) <= ("DS321" in reported)


def test_a_job_that_breaks_a_rule_has_no_estimate() -> None:
    workload = workload_of("", "qwen2.5-7b")
    job = Job(model="m", output_dir="o", tp=8)
    file = JobFile(job=job, locate=lambda keys: Place(file="job.yaml", line=1, column=1))
    document, _ = read('{"zero_optimization": {"stage": 1}}', "ds_config.json")
    assert document is not None
    subject = subject_of(JobContext(job=file, model=workload.model, cluster=workload.cluster), document)
    assert estimated(subject).estimate is None
    job = replace(job, tp=4)
    assert estimated(replace(subject, job=replace(file, job=job))).estimate is not None
