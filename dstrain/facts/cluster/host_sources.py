"""Reads hosts from schedulers and other tools: SLURM, PBS, LSF, Open MPI, Kubernetes, SkyPilot, ssh.

Each source reads the environment of its own jobs, or its own file. GPUs are counted where the source counts them;
elsewhere `slots` says how many each host has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import MAX_HOSTS, Host, Hosts, expand

Environment = Mapping[str, str]
Read = Callable[[Path], str]
"""Returns the text of a file; raises InvalidConfig where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuery:
    """What a source may look at."""

    environment: Environment
    """The environment of the job."""
    read: Read
    """Reads a file."""
    file: Path | None
    """The file that was named, in place of the source's own."""
    slots: int | None
    """GPUs of every host, where that was said."""
    match: str | None
    """Only hosts whose name matches this pattern (`gpu*`)."""


def _needed(asked: HostQuery, *names: str) -> tuple[str, str]:
    """Returns the first of these variables that is set: name and value."""
    for name in names:
        if asked.environment.get(name):
            return name, asked.environment[name]
    raise InvalidConfig(
        f"{' and '.join(names)}: not set here",
        hint="Run this inside a job of that scheduler, or name its file with --from-file.",
    )


def _hosts(counts: Iterable[tuple[str, int | None]], asked: HostQuery, name: str) -> Hosts:
    """Returns the hosts, each once, in the order of their first mention; what was said of slots wins."""
    found: dict[str, int] = {}
    for host, count in counts:
        slots = asked.slots or count
        if slots is None:
            raise InvalidConfig(f"{name}: says nothing of GPUs", hint="Add --slots 8 where every host has 8.")
        found.setdefault(host, slots)
    if not found:
        raise InvalidConfig(f"{name}: names no host")
    if len(found) > MAX_HOSTS:
        raise InvalidConfig(f"{name}: {len(found)} hosts; the most is {MAX_HOSTS}")
    return Hosts(hosts=tuple(Host(name=host, slots=slots) for host, slots in found.items()), name=name)


def slurm(asked: HostQuery) -> Hosts:
    """SLURM: `SLURM_JOB_NODELIST`, with as many GPUs as the job has on a node.

    Source: the manual of sbatch, "Output environment variables"; `SLURM_GPUS_PER_NODE` may name a type (`h100:8`).
    """
    if asked.file is not None:
        return _lines(asked)
    name, nodes = _needed(asked, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    given = [asked.environment.get(key, "") for key in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")]
    counts = [int(match[1]) for text in given if (match := re.search(r"(?:^|:)(\d+)(?:\(|$)", text))]
    slots = asked.slots or (counts[0] if counts else None)
    if slots is None:
        raise InvalidConfig(
            f"{name} names hosts, and neither SLURM_GPUS_ON_NODE nor SLURM_GPUS_PER_NODE says how many GPUs they have",
            hint="Ask for GPUs with sbatch --gpus-per-node=8, or add --slots 8.",
        )
    return expand(nodes, slots, name)


def pbs(asked: HostQuery) -> Hosts:
    """PBS and Torque: the file that `PBS_NODEFILE` names, one line for each slot of a host."""
    path = asked.file or Path(_needed(asked, "PBS_NODEFILE")[1])
    return _hosts(_repeated(asked.read(path)), asked, str(path))


def lsf(asked: HostQuery) -> Hosts:
    """LSF: the file that `LSB_DJOB_HOSTFILE` names, one line for each slot, else `LSB_MCPU_HOSTS` (`a 8 b 8`)."""
    if asked.file is None and not asked.environment.get("LSB_DJOB_HOSTFILE"):
        name, text = _needed(asked, "LSB_MCPU_HOSTS")
        words = text.split()
        pairs = zip(words[::2], words[1::2], strict=False)
        return _hosts([(host, _whole(count, name)) for host, count in pairs], asked, name)
    path = asked.file or Path(asked.environment["LSB_DJOB_HOSTFILE"])
    return _hosts(_repeated(asked.read(path)), asked, str(path))


def openmpi(asked: HostQuery) -> Hosts:
    """Open MPI: its hostfile, `HOST slots=8 max_slots=8`, as `OMPI_MCA_orte_default_hostfile` or PRRTE names it."""
    path = asked.file
    if path is None:
        names = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "PRTE_MCA_hostfile")
        path = Path(_needed(asked, *names)[1])
    return _hosts(_mpi_lines(asked.read(path)), asked, str(path))


def k8s(asked: HostQuery) -> Hosts:
    """Kubernetes: Volcano's `VC_*_HOSTS`, else the hostfile of Kubeflow's MPIJob, `/etc/mpi/hostfile`.

    Source: Volcano's env and svc plug-ins; Kubeflow's MPI operator, `HOST slots=8` or, for Intel MPI, `HOST:8`.
    """
    named = {name: text for name, text in asked.environment.items() if re.fullmatch(r"VC_\w+_HOSTS", name)}
    if asked.file is None and named:
        order = sorted(named, key=lambda name: ("MASTER" not in name and "LAUNCHER" not in name, name))
        hosts = [(host, None) for name in order for host in named[name].split(",") if host]
        return _hosts(hosts, asked, " and ".join(order))
    path = asked.file or Path("/etc/mpi/hostfile")
    return _hosts(_mpi_lines(asked.read(path)), asked, str(path))


def sky(asked: HostQuery) -> Hosts:
    """SkyPilot: `SKYPILOT_NODE_IPS`, one a line, and `SKYPILOT_NUM_GPUS_PER_NODE`."""
    if asked.file is not None:
        return _lines(asked)
    name, text = _needed(asked, "SKYPILOT_NODE_IPS")
    count = asked.environment.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
    slots = int(float(count)) if re.fullmatch(r"\d+(\.0+)?", count) else None
    return _hosts([(host, slots) for host in text.split()], asked, name)


def ssh_config(asked: HostQuery) -> Hosts:
    """OpenSSH: the `Host` lines of `~/.ssh/config` without wildcards; `--match` chooses among them."""
    path = asked.file or Path.home() / ".ssh" / "config"
    names = []
    for line in asked.read(path).splitlines():
        match = re.match(r"\s*Host(?:\s+|\s*=\s*)(.*)", line, re.IGNORECASE)
        words = match[1].split("#")[0].split() if match else []
        names += [word for word in words if not re.search(r"[*?!]", word)]
    return _hosts([(name, None) for name in names if _is_wanted(name, asked)], asked, str(path))


def _is_wanted(name: str, asked: HostQuery) -> bool:
    from fnmatch import fnmatchcase

    return asked.match is None or fnmatchcase(name, asked.match)


def _lines(asked: HostQuery) -> Hosts:
    """Returns the hosts of a file that has one a line."""
    assert asked.file is not None
    return _hosts([(line, None) for line in _words(asked.read(asked.file))], asked, str(asked.file))


def _words(text: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _repeated(text: str) -> list[tuple[str, int | None]]:
    """Returns each host with how often it stands there."""
    return list(Counter(word.split()[0] for word in _words(text)).items())


def _mpi_lines(text: str) -> list[tuple[str, int | None]]:
    """Returns the hosts of an MPI hostfile: `HOST slots=8 max_slots=8`, `HOST:8`, or a host a line."""
    found: list[tuple[str, int | None]] = []
    for line in _words(text):
        host = line.split()[0]
        slots = re.search(r"\bslots\s*=\s*(\d+)", line)
        short = re.fullmatch(r"([^:]+):(\d+)", host)
        count = int(slots[1]) if slots else int(short[2]) if short else None
        found.append((short[1] if short else host, count))
    return found


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise InvalidConfig(f'{name}: "{text}" is not a number of slots')
    return int(text)


SOURCES: Mapping[str, Callable[[HostQuery], Hosts]] = MappingProxyType(
    {
        "slurm": slurm,
        "pbs": pbs,
        "lsf": lsf,
        "openmpi": openmpi,
        "k8s": k8s,
        "sky": sky,
        "ssh-config": ssh_config,
    }
)
"""Every source by its name."""
