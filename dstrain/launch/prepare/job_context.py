"""The context of a job before it runs: its model, its machines, and what its configuration needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dstrain.config.edits.lock import read_lock
from dstrain.config.lint.finding import Finding
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.gpus import CPU
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import is_local, resolve_gpu, resolve_hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import ACCELERATOR
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import job_checks
from dstrain.launch.prepare.hostfile_findings import of_hostfile, of_hosts
from dstrain.plan.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """Everything known about a job besides its DeepSpeed configuration."""

    job: JobFile | None = None
    hosts: Hosts | None = None
    """The names and slots of its machines."""
    model: ModelFacts | None = None
    cluster: Cluster | None = None
    """Its machines."""
    findings: tuple[Finding, ...] = ()
    """Findings about its hostfile and its data."""


def known(file: JobFile, folder: Path) -> JobContext:
    """Returns what is known of a job without running it; `folder` is where its configuration stands.

    Where this machine has no GPU, the machines are those that the plan beside it was made for.
    """
    job = file.job
    model, _ = model_of(job)
    lock = read_lock(folder)
    planned = lock.cluster if lock is not None else None
    findings: list[Finding] = []
    try:
        hosts = hosts_of(file)
    except InvalidConfig as error:
        findings = [*of_hostfile(error), *job_checks.findings(file)]
        return JobContext(job=file, model=model, findings=tuple(findings))  # on what it trains nobody knows
    if job.hostfile is not None:
        findings = of_hosts(hosts, planned.num_gpus if planned else None)
    on_cpu = {**os.environ, **job.env}.get(ACCELERATOR) == "cpu"
    found = describe(hosts, on_cpu=on_cpu, planned=planned)
    findings = [*findings, *job_checks.findings(file)]
    return JobContext(job=file, hosts=hosts, model=model, cluster=found, findings=tuple(findings))


def hosts_of(file: JobFile) -> Hosts:
    """Returns the hosts of a job. Raises InvalidConfig where its hostfile is wrong or missing."""
    name = file.job.hostfile
    return resolve_hosts(None if name is None else Path(name), place=file.locate(("hostfile",)))


def model_of(job: Job) -> tuple[ModelFacts | None, list[str]]:
    """Returns the facts of the model, or None and a line that says why there is no estimate."""
    try:
        return probe.read_model(job.model, hub=job.hub), []
    except (InvalidConfig, EnvironmentProblem) as error:
        return None, [f"no estimate of memory: {error.problem}"]


def describe(hosts: Hosts, *, on_cpu: bool, planned: Cluster | None = None) -> Cluster:
    """Describes the cluster from this machine, or from the plan when this machine has no GPU."""
    gpu, origin = resolve_gpu(
        given=CPU if on_cpu else None,
        planned=(planned.gpu, Origin.GIVEN) if planned is not None else None,  # whatever it was then
    )
    memory, memory_origin = probe.host_memory_bytes() if is_local(hosts) else None, Origin.MEASURED
    if planned is not None and not on_cpu and origin is not Origin.MEASURED:
        memory, memory_origin = planned.host_memory_bytes, planned.host_memory_origin
    return clusters.describe(
        gpu=gpu,
        gpu_origin=origin,
        gpus=None,
        hosts=hosts,
        host_memory_bytes=memory,
        host_memory_origin=memory_origin,
    )


def request_of(job: Job) -> Request:
    """Returns the job as a complete request."""
    return Request(
        method=job.method,
        lora=job.lora,
        seq_len=job.seq_len,
        micro_batch=job.micro_batch,
        grad_accum=job.grad_accum,
        grad_ckpt=job.grad_ckpt,
        precision=job.precision,
        attn=job.attn,
        packing=job.packing,
    )
