"""Prepares a run from a job file: checks it, and decides what the run directory holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Method
from dstrain.config.lint.engine import errors
from dstrain.config.lint.finding import Finding, Severity
from dstrain.config.resolve_auto import for_trainer
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster import machines
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import ACCELERATOR, visible_devices
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import job_checks, resize_checkpoint
from dstrain.launch.prepare.job_context import JobContext, describe, hosts_of, model_of
from dstrain.launch.prepare.lint_job import lint_job, refused
from dstrain.launch.prepare.resize_checkpoint import Resize
from dstrain.paths import shown
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.params import adapted, linear_names
from dstrain.records import to_data
from dstrain.rundir import RunDir, damage


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Everything known before the launch. Nothing is written yet."""

    job: Job
    run_dir: RunDir
    """Where the run will be."""
    hosts: Hosts
    """The machines."""
    is_local: bool
    """Whether all ranks run here."""
    devices: tuple[int, ...] | None
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or None for all."""
    on_cpu: bool
    """Whether ranks train on the CPU."""
    ds_config: dict[str, Any]
    """The configuration that the Trainer is given."""
    model: ModelFacts | None
    """Facts about the model; None where its family is not known."""
    cluster: Cluster
    """Facts about the machines."""
    estimate: Estimate | None
    """What the configuration needs."""
    notes: tuple[str, ...]
    """What to say before the launch."""
    elastic: Resize | None = None
    """The checkpoint that has to be converted before the launch, for another number of ranks."""


def prepare(
    file: JobFile, environment: Mapping[str, str], *, ignored: Sequence[str] = (), hosts: Hosts | None = None
) -> PreparedRun:
    """Returns the checked run; `ignored` are ids of lint's rules, `hosts` stand in for the job's hostfile.

    Raises InvalidConfig or EnvironmentProblem, with the line to edit, before anything is written or started."""
    merged = {**environment, **file.job.env}
    on_cpu = merged.get(ACCELERATOR) == "cpu"
    data_notes = job_checks.check(file, on_cpu=on_cpu)
    _check_resume(file)
    hosts = machines.named(hosts or hosts_of(file))
    resuming = resize_checkpoint.resuming(file.job, num_ranks=hosts.num_slots)
    job, file = resuming.job, replace(file, job=resuming.job)
    if (is_local := machines.is_local(hosts)) and not on_cpu:
        _check_gpus(hosts)
    model, unknown = model_of(job)
    cluster = describe(hosts, on_cpu=on_cpu)
    job_checks.check_gpu(file, cluster)
    _check_targets(file, model)
    context = JobContext(job=file, hosts=hosts, model=model, cluster=cluster)
    linted = lint_job(context, Path(job.ds_config), ignored=ignored)
    if linted.subject is None or errors(linted.findings):
        raise resuming.explained(refused(linted.findings))
    job_checks.check_engine_packages(linted.subject.config, shown(job.ds_config))
    config = for_trainer(linted.subject.config, job, model, num_ranks=hosts.num_slots)
    notes = [*resuming.notes, *(note for finding in linted.findings if (note := _note(finding)))]
    if not is_local and "CUDA_VISIBLE_DEVICES" in environment:
        notes.append("CUDA_VISIBLE_DEVICES is not used on several nodes: the slots of the hostfile count from GPU 0")
    return PreparedRun(
        job=job,
        run_dir=RunDir(Path(job.output_dir)),
        hosts=hosts,
        is_local=is_local,
        devices=visible_devices(merged.get("CUDA_VISIBLE_DEVICES")) if is_local and not on_cpu else None,
        on_cpu=on_cpu,
        ds_config=config,
        model=model,
        cluster=cluster,
        estimate=linted.subject.estimate,
        notes=(*notes, *unknown, *data_notes),
        elastic=resize_checkpoint.decide(resuming.saved, config, num_ranks=hosts.num_slots),
    )


def facts_text(prepared: PreparedRun) -> str:
    """Returns the text of facts.json; an assumed GPU is not a fact, and the ranks must not compute MFU from it."""
    known = prepared.cluster.gpu_origin is not Origin.ASSUMED
    facts = {
        "model": to_data(prepared.model) if prepared.model else None,
        "cluster": to_data(prepared.cluster) if known else None,
    }
    return json.dumps(facts, indent=2) + "\n"


def _check_resume(file: JobFile) -> None:
    wanted = file.job.resume
    problem = None if wanted in ("never", "auto") else damage(Path(wanted))
    if problem is not None:
        state = problem if Path(wanted).is_dir() else "does not exist"
        raise InvalidConfig(
            f"checkpoint {shown(wanted)} {state}",
            place=file.locate(("resume",)),
            hint="Write resume: auto to go on from the newest whole checkpoint of output_dir.",
        )


def _check_gpus(hosts: Hosts) -> None:
    """Raises EnvironmentProblem when this machine has fewer GPUs than slots."""
    if not probe.local_gpus():
        raise EnvironmentProblem(
            f"{hosts.name} asks for {hosts.num_slots} GPUs, and NVML finds none on this machine",
            hint="Check nvidia-smi. To train on the CPU all the same: dstrain run --set env.DS_ACCELERATOR=cpu",
        )
    if (lack := machines.shortage(hosts)) is not None:
        raise lack


def _check_targets(file: JobFile, model: ModelFacts | None) -> None:
    """Raises InvalidConfig for LoRA targets that the model does not have."""
    job = file.job
    if model is not None and job.method is not Method.FULL and not adapted(model, job.lora):
        place, targets = file.locate(("lora", "targets")), ", ".join(job.lora.targets)
        raise InvalidConfig(
            f"no linear layer of {model.name} is named {targets}",
            place=place,
            hint=f"Its linear layers: {', '.join(linear_names(model))}.",
        )


def _note(finding: Finding) -> str | None:
    """Returns a warning of lint in one line; notes are for `dstrain lint`."""
    if finding.severity is not Severity.WARNING:
        return None
    return f"{finding.place}: {finding.rule}: {finding.problem}; {finding.fix}"


def cpu_threads(num_ranks: int) -> int:
    """Returns the threads of one rank when ranks share this machine's cores."""
    return max(1, (os.cpu_count() or 1) // num_ranks)
