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
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.this_machine import ACCELERATOR, is_this_machine
from dstrain.facts.this_machine import names as machine_names
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare import job_checks
from dstrain.launch.prepare.hostfile_findings import HOSTFILE, SLOTS, of_hostfile
from dstrain.paths import shown
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
    hosts = Hosts(hosts=(Host(name="localhost", slots=max(1, len(probe.local_gpus()))),), name="this machine")
    if job.hostfile is not None:
        try:
            hosts = probe.read_hostfile(Path(job.hostfile))
        except InvalidConfig as error:
            findings = of_hostfile(error)
            if not Path(job.hostfile).exists():
                findings = [_no_hostfile(file)]
            findings += job_checks.findings(file)
            return JobContext(job=file, model=model, findings=tuple(findings))  # on what it trains nobody knows
    on_cpu = {**os.environ, **job.env}.get(ACCELERATOR) == "cpu"
    is_local = len(hosts.hosts) == 1 and is_this_machine(hosts.hosts[0].name, machine_names())
    if job.hostfile is not None:
        num_planned = planned.num_gpus if planned else None
        findings = of_hosts(hosts, num_planned, len(probe.local_gpus()), is_local=is_local)
    found = machines(hosts, on_cpu=on_cpu, is_local=is_local, planned=planned)
    findings = [*findings, *job_checks.findings(file)]
    return JobContext(job=file, hosts=hosts, model=model, cluster=found, findings=tuple(findings))


def _no_hostfile(file: JobFile) -> Finding:
    """Returns what to say of a hostfile that the job names and that is not there."""
    return Finding(
        rule=HOSTFILE,
        severity=Severity.ERROR,
        place=file.locate(("hostfile",)),
        problem=f"hostfile {shown(str(file.job.hostfile))}: no such file",
        effect="dstrain run refuses it; DeepSpeed would train on this machine alone",
        fix="write the file (dstrain hostfile write), or remove the line",
    )


def of_hosts(hosts: Hosts, num_planned: int | None, num_here: int, *, is_local: bool) -> list[Finding]:
    """Returns what is wrong with the slots of a hostfile that can be read; `num_here` GPUs are in this machine."""
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
    first = hosts.hosts[0]
    if is_local and 0 < num_here < first.slots:
        problem = (
            f"{first.name} has {_counted(first.slots, 'slot')}, and this machine shows {_counted(num_here, 'GPU')}"
        )
        effect = "dstrain run refuses it; DeepSpeed would start ranks without a GPU"
        found.append(_of_line(SLOTS, hosts, first.line or 1, problem, effect, f"write slots={num_here}"))
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


def machines(hosts: Hosts, *, on_cpu: bool, is_local: bool, planned: Cluster | None = None) -> Cluster:
    """Returns the machines as far as this one tells: its smallest GPU stands for all; where it has none, what was
    `planned` for does."""
    local = probe.local_gpus()
    if on_cpu:
        gpu, origin = gpus.gpu("cpu"), Origin.GIVEN
    elif local:
        smallest = min(local, key=lambda each: each.memory_mib)
        try:
            gpu = gpus.from_nvml_name(smallest.name, smallest.memory_mib)
        except InvalidConfig:
            gpu = gpus.unlisted(smallest.name, smallest.memory_mib)
        origin = Origin.MEASURED
    elif planned is not None:
        gpu, origin = planned.gpu, Origin.GIVEN  # whatever it was then: the plan is for these
    else:
        gpu, origin = gpus.gpu("a100-80g"), Origin.ASSUMED
    memory, memory_origin = probe.host_memory_bytes() if is_local else None, Origin.MEASURED
    if planned is not None and not local and not on_cpu:
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
