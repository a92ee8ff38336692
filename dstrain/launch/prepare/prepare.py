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
from dstrain.facts.cluster import hostfile
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import ACCELERATOR, is_this_machine, visible_devices
from dstrain.facts.this_machine import names as machine_names
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import job_checks, resize_checkpoint
from dstrain.launch.prepare.job_context import JobContext, machines, model_of
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
    hosts = hosts or _hosts(file)
    resuming = resize_checkpoint.resuming(file.job, num_ranks=hosts.num_slots)
    job, file = resuming.job, replace(file, job=resuming.job)
    is_local = len(hosts.hosts) == 1 and is_this_machine(hosts.hosts[0].name, machine_names())
    _check_gpus(file, hosts, is_local=is_local, on_cpu=on_cpu)
    model, unknown = model_of(job)
    cluster = machines(hosts, on_cpu=on_cpu, is_local=is_local)
    job_checks.check_gpu(file, cluster)
    _check_targets(file, model)
    linted = lint_job(
        JobContext(job=file, hosts=hosts, model=model, cluster=cluster), Path(job.ds_config), ignored=ignored
    )
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


def _hosts(file: JobFile) -> Hosts:
    """Returns the hosts of the hostfile, or this machine's GPUs where none is named."""
    name = file.job.hostfile
    if name is not None:
        path = Path(name)
        if not path.exists():
            raise InvalidConfig(
                f"hostfile {shown(name)}: no such file",
                place=file.locate(("hostfile",)),
                hint="DeepSpeed would train on this machine alone. Write the file, or remove the line to mean that.",
            )
        found = hostfile.parse(probe.read_text(path), shown(name))
        if found.placeholder_lines:
            lines = ", ".join(f"{shown(name)}:{line}" for line in found.placeholder_lines)
            raise InvalidConfig(f"{lines}: a placeholder, not a host", hint="Write the names of your nodes there.")
        return found
    count = len(probe.local_gpus())
    return Hosts(hosts=(Host(name="localhost", slots=max(1, count)),), name="this machine")


def _check_gpus(file: JobFile, hosts: Hosts, *, is_local: bool, on_cpu: bool) -> None:
    """Raises EnvironmentProblem when this machine has fewer GPUs than slots."""
    if not is_local or on_cpu:
        return
    count, slots = len(probe.local_gpus()), hosts.num_slots
    if count == 0:
        raise EnvironmentProblem(
            f"{hosts.name} asks for {slots} GPUs, and NVML finds none on this machine",
            hint="Check nvidia-smi. To train on the CPU all the same: dstrain run --set env.DS_ACCELERATOR=cpu",
        )
    if slots > count:
        raise EnvironmentProblem(
            f"{hosts.name} asks for {slots} GPUs, and this machine shows {count}",
            hint=f"Write slots={count}, or check CUDA_VISIBLE_DEVICES and nvidia-smi.",
        )


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
