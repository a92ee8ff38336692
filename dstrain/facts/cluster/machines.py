"""The machines of a job: its GPU and its hosts, decided here for every verb."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dstrain.errors import EnvironmentProblem, InvalidConfig, Place
from dstrain.facts import probe, this_machine
from dstrain.facts.cluster import gpus, hostfile
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.probe import LocalGpu
from dstrain.job.file import JobFile
from dstrain.paths import shown
from dstrain.units import MIB, counted

ASSUMED_GPU = "a100-80g"
"""The GPU of a plan if none is given, present or planned for before."""


def resolve_gpu(*, given: str | None = None, planned: tuple[Gpu, Origin] | None = None) -> tuple[Gpu, Origin]:
    """Returns the GPU and its origin: as given, else the smallest one here, else as planned, else assumed.

    `given` may be a GPU outside the table if this machine has it. Raises InvalidConfig for any other unknown name.
    """
    local = [_gpu(gpu) for gpu in probe.local_gpus()]
    if given is not None:
        unlisted = [gpu for gpu in local if not gpu.is_listed and gpus.is_called(gpu.name, given)]
        return unlisted[0] if unlisted else gpus.gpu(given), Origin.GIVEN
    if local:
        return min(local, key=lambda gpu: gpu.memory_mib), Origin.MEASURED
    return planned or (gpus.gpu(ASSUMED_GPU), Origin.ASSUMED)


def _gpu(local: LocalGpu) -> Gpu:
    """Returns a GPU of this machine; the memory of an integrated one is the RAM."""
    gpu = gpus.from_nvml(local.name, local.memory_mib, local.chip)
    return gpu if gpu.memory_mib else replace(gpu, memory_mib=probe.host_memory_bytes() // MIB)


def resolve_hosts(path: Path | None, *, place: Place | None = None) -> Hosts:
    """Returns the hosts of a hostfile, or this machine with its GPUs if `path` is None.

    `place` is where the path was given. Raises InvalidConfig if the file is wrong or missing: DeepSpeed would silently
    train on this machine alone.
    """
    if path is None:
        return local_host(max(1, len(probe.local_gpus())))
    name = shown(str(path))
    if not path.exists():
        raise InvalidConfig(
            f"hostfile {name}: no such file",
            place=place,
            hint="Write it with `dstrain hostfile write`, or leave it out to train on this machine alone.",
        )
    return hostfile.parse(probe.read_text(path), name)


def hosts_of(file: JobFile) -> Hosts:
    """Returns the hosts of a job. Raises InvalidConfig if its hostfile is wrong or missing."""
    name = file.job.hostfile
    return resolve_hosts(None if name is None else Path(name), place=file.locate(("hostfile",)))


def local_host(slots: int) -> Hosts:
    """Returns this machine as the only host."""
    return Hosts(hosts=(Host(name=this_machine.LOCAL, slots=slots),), name="this machine")


def named(hosts: Hosts) -> Hosts:
    """Returns `hosts`. Raises InvalidConfig if any of them is a placeholder."""
    if problems := placeholders(hosts):
        text = "\n".join(problem.problem for problem in problems)
        raise InvalidConfig(text, hint=problems[0].hint, parts=problems)
    return hosts


def placeholders(hosts: Hosts) -> list[InvalidConfig]:
    """Returns one problem for each host that is still a placeholder."""
    names = [host.name for host in hosts.hosts if host.name.startswith(hostfile.PLACEHOLDER)]
    places = [Place(file=hosts.name, line=line, column=1) for line in hosts.placeholder_lines]
    return [
        InvalidConfig(f"{name} is a placeholder, not a host", place=place, hint="Replace it with the name of a node.")
        for place, name in zip(places, names, strict=True)
    ]


def is_local(hosts: Hosts) -> bool:
    """Returns whether all ranks run on this machine."""
    return len(hosts.hosts) == 1 and this_machine.is_this_machine(hosts.hosts[0].name, this_machine.names())


def shortage(hosts: Hosts) -> EnvironmentProblem | None:
    """Returns an error if this machine is the only host and has fewer visible GPUs than slots, else None.

    Without visible GPUs the plan is for other machines or for the CPU.
    """
    count = len(probe.local_gpus())
    if not 0 < count < hosts.num_slots or not is_local(hosts):
        return None
    return shortage_of(hosts.num_slots, count, Place(file=hosts.name, line=hosts.hosts[0].line or 1, column=1))


def shortage_of(slots: int, count: int, place: Place | None = None) -> EnvironmentProblem:
    """Returns the error for a host with more slots than GPUs.

    >>> shortage_of(8, 1).problem
    '8 slots, but only 1 GPU'
    """
    problem = f"{counted(slots, 'slot')}, but only {counted(count, 'GPU')}"
    return EnvironmentProblem(problem, place=place, hint=f"write slots={count} into the hostfile")
