"""The context of a job before it runs: its model, its machines, and what its configuration needs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.config.edits.lock import read_lock
from dstrain.config.lint.finding import Finding, Severity
from dstrain.errors import EnvironmentProblem, InvalidConfig, Place
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.gpus import CPU
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.machines import is_local, resolve_gpu, resolve_hosts, shortage
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import ACCELERATOR, is_this_machine
from dstrain.facts.this_machine import names as machine_names
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import job_checks
from dstrain.launch.prepare.hostfile_findings import HOSTFILE, SLOTS, of_hostfile
from dstrain.plan.request import Request

if TYPE_CHECKING:
    from dstrain.facts.cluster.cluster import Cluster
    from dstrain.facts.cluster.hostfile import Hosts
    from dstrain.facts.model.model_facts import ModelFacts
    from dstrain.job.file import JobFile


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


def of_hosts(hosts: Hosts, num_planned: int | None) -> list[Finding]:
    """Returns what is wrong with the slots of a hostfile that can be read."""
    found = []
    if hosts.placeholder_lines:
        problem = f"{hosts.hosts[0].name} is a placeholder, not a host"
        line, effect = hosts.placeholder_lines[0], "dstrain run refuses it"
        found.append(_of_line(HOSTFILE, hosts, line, problem, effect, "write your nodes there"))
    elif num_planned is not None and hosts.num_slots != num_planned:
        problem = f"{_counted(hosts.num_slots, 'slot')} in all, and the plan is for {_counted(num_planned, 'GPU')}"
        effect = "the samples of a step change with the ranks"
        fix = f"dstrain gen-config --gpus {hosts.num_slots} plans for these"
        found.append(_of_line(SLOTS, hosts, 1, problem, effect, fix))
    if (lack := shortage(hosts)) is not None:
        effect = "dstrain run refuses it; DeepSpeed would start ranks without a GPU"
        found.append(_of_line(SLOTS, hosts, hosts.hosts[0].line or 1, lack.text, effect, lack.hint or ""))
    return [*found, *_same_machines(hosts)]


def _of_line(rule: str, hosts: Hosts, line: int, problem: str, effect: str, fix: str) -> Finding:
    """Returns a warning about a line of a hostfile."""
    place = Place(file=hosts.name, line=line, column=1)
    return Finding(rule=rule, severity=Severity.WARNING, place=place, problem=problem, effect=effect, fix=fix)


def _same_machines(hosts: Hosts) -> list[Finding]:
    """Returns what is wrong with hosts that are two names of one machine, as far as the names tell."""
    here, known, findings = machine_names(), dict[str, str](), list[Finding]()
    for order, host in enumerate(hosts.hosts, start=1):
        name = host.name.rpartition("@")[2].lower()
        is_address = ":" in name or name.replace(".", "").isdigit()
        is_here = is_this_machine(name, here) and not (name.startswith("127.") and name != "127.0.0.1")
        machine = "" if is_here else name if is_address else name.partition(".")[0]
        first = known.setdefault(machine, name)
        if first != name and (is_here or first.startswith(f"{name}.") or name.startswith(f"{first}.")):
            problem = f"{host.name} and {first} are two names of one machine"
            effect = "two sets of ranks share its GPUs: the run stops, or each has half of the memory"
            finding = _of_line(HOSTFILE, hosts, host.line or order, problem, effect, "remove one of the two lines")
            findings.append(replace(finding, severity=Severity.ERROR))
    return findings


def _counted(count: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> _counted(1, "slot"), _counted(8, "GPU")
    ('1 slot', '8 GPUs')
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What is known beside the configuration."""

    job: JobFile | None = None
    hosts: Hosts | None = None
    """Its machines' names and slots."""
    model: ModelFacts | None = None
    cluster: Cluster | None = None
    """Its machines."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with its hostfile."""
