"""Reads hosts from schedulers and other tools: SLURM, PBS, LSF, Open MPI, Kubernetes, SkyPilot, ssh.

Each source reads the environment of its own jobs, or its own file. Sources that do not count GPUs need `slots`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import MAX_HOSTS, Host, Hosts, expand

Environment = Mapping[str, str]
Read = Callable[[Path], str]
"""Returns the text of a file; raises InvalidConfig if it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuery:
    """The inputs of a source."""

    environment: Environment
    read: Read
    file: Path | None = None
    """A file to read in place of the source's own."""
    slots: int | None = None
    """GPUs of every host; None: as counted by the source."""
    match: str | None = None
    """Pattern of host names (`gpu*`); None: all."""
    details: Callable[[str], str] = lambda job: ""
    """Returns SLURM's description of a job, node by node; empty if it does not answer."""


def _needed(query: HostQuery, *names: str) -> tuple[str, str]:
    """Returns (name, value) of the first of these variables that is set."""
    for name in names:
        if query.environment.get(name):
            return name, query.environment[name]
    raise InvalidConfig(
        f"{' and '.join(names)}: not set",
        hint="Run this inside a job of that scheduler, or give its file with --from-file.",
    )


def _hosts(counts: Iterable[tuple[str, int | None]], query: HostQuery, name: str) -> Hosts:
    """Returns the hosts without repetitions, in order; the slots of the query override counts."""
    unique: dict[str, int] = {}
    for host, count in counts:
        slots = query.slots or count
        if slots is None:
            raise InvalidConfig(f"{name}: does not count GPUs", hint="Add --slots 8 if every host has 8.")
        unique.setdefault(host, slots)
    if not unique:
        raise InvalidConfig(f"{name}: no hosts")
    if len(unique) > MAX_HOSTS:
        raise InvalidConfig(f"{name}: {len(unique)} hosts; the limit is {MAX_HOSTS}")
    return Hosts(hosts=tuple(Host(name=host, slots=slots) for host, slots in unique.items()), name=name)


def slurm(query: HostQuery) -> Hosts:
    """SLURM: `SLURM_JOB_NODELIST`, with the GPUs that the job has on each node, which may differ.

    `scontrol show job --details` counts them; without its answer it is the job's variables. Source: the manual of
    sbatch, "Output environment variables".
    """
    if query.file is not None:
        return _lines(query)
    name, nodes = _needed(query, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    names = [host.name for host in expand(nodes, 1, name).hosts]
    if query.slots is not None:
        return expand(nodes, query.slots, name)
    job = query.environment.get("SLURM_JOB_ID")
    counts = _slurm_details(query.details(job)) if job else {}
    if not all(counts.get(node) for node in names):
        counts = dict(zip(names, _slurm_counts(query.environment, names, name), strict=True))
    return _hosts([(node, counts[node]) for node in names], query, name)


def _slurm_details(text: str) -> dict[str, int]:
    """Returns the GPUs of each node that `scontrol show job --details` names.

    >>> _slurm_details("  Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:4(IDX:0-3),gpu:v100:2(IDX:4-5)\\n")
    {'n1': 6, 'n2': 6}
    """
    counts: dict[str, int] = {}
    for nodes, gres in re.findall(r"^\s+Nodes=(\S+) .*?GRES(?:_IDX)?=(\S*)", text, re.MULTILINE):
        number = _slurm_gpus(",".join(part for part in re.split(r",(?![^(]*\))", gres) if part.startswith("gpu")))
        counts |= {host.name: number for host in expand(nodes, 1, "scontrol").hosts}
    return counts


def _slurm_gpus(text: str) -> int:
    """Returns a number of GPUs that SLURM writes with their types.

    >>> [_slurm_gpus(text) for text in ("8", "h100:2", "gpu:a100:4(IDX:0-3),gpu:v100:2", "")]
    [8, 2, 6, 0]
    """
    return sum(map(int, re.findall(r"(?:^|[:,])(\d+)(?=\(|,|$)", re.sub(r"\([^)]*\)", "", text))))


def _slurm_counts(environment: Environment, nodes: list[str], name: str) -> list[int]:
    """Returns the GPUs of each node as the variables of a job say them. Raises InvalidConfig if they do not."""
    given = {key: _slurm_gpus(environment.get(f"SLURM_{key}", "")) for key in ("GPUS_PER_NODE", "GPUS", "GPUS_ON_NODE")}
    total, here = given["GPUS"], given["GPUS_ON_NODE"]
    if given["GPUS_PER_NODE"]:
        return [given["GPUS_PER_NODE"]] * len(nodes)
    if per_task := _slurm_gpus(environment.get("SLURM_GPUS_PER_TASK", "")):
        # such as 2(x3),1: two tasks on each of three nodes, and one on the fourth
        runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_TASKS_PER_NODE", ""))
        tasks = [int(count) for count, times in runs for _ in range(int(times or 1))]
        if len(tasks) == len(nodes):
            return [per_task * count for count in tasks]
    if len(nodes) == 1 and (here or total):
        return [here or total]
    if total and total != here * len(nodes):
        raise InvalidConfig(
            f"{name} has {len(nodes)} nodes with {total} GPUs, of which {here or 'an unknown number'} are on this one: "
            "how many each of the others has, no variable says, and scontrol does not answer",
            hint="Request as many on each node: sbatch --gpus-per-node=4. "
            f"Or name them, such as: dstrain hostfile write {nodes[0]}:{here or 8},{nodes[1]}:{max(1, total - here)}",
        )
    if not here:
        raise InvalidConfig(
            f"{name} is set, but neither SLURM_GPUS_ON_NODE nor SLURM_GPUS_PER_NODE",
            hint="Request GPUs with sbatch --gpus-per-node=8, or add --slots 8.",
        )
    return [here] * len(nodes)


def pbs(query: HostQuery) -> Hosts:
    """PBS and Torque: the file in `PBS_NODEFILE`, with one line per slot of a host."""
    path = query.file or Path(_needed(query, "PBS_NODEFILE")[1])
    return _hosts(_repeated(query.read(path)), query, str(path))


def lsf(query: HostQuery) -> Hosts:
    """LSF: the file in `LSB_DJOB_HOSTFILE`, with one line per slot, else `LSB_MCPU_HOSTS` (`a 8 b 8`)."""
    if query.file is None and not query.environment.get("LSB_DJOB_HOSTFILE"):
        name, text = _needed(query, "LSB_MCPU_HOSTS")
        words = text.split()
        pairs = zip(words[::2], words[1::2], strict=False)
        return _hosts([(host, _whole(count, name)) for host, count in pairs], query, name)
    path = query.file or Path(query.environment["LSB_DJOB_HOSTFILE"])
    return _hosts(_repeated(query.read(path)), query, str(path))


def openmpi(query: HostQuery) -> Hosts:
    """Open MPI: the hostfile in `OMPI_MCA_orte_default_hostfile` or of PRRTE, `HOST slots=8 max_slots=8`."""
    path = query.file
    if path is None:
        names = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "PRTE_MCA_hostfile")
        path = Path(_needed(query, *names)[1])
    return _hosts(_mpi_lines(query.read(path)), query, str(path))


def k8s(query: HostQuery) -> Hosts:
    """Kubernetes: Volcano's `VC_*_HOSTS`, else the hostfile of Kubeflow's MPIJob, `/etc/mpi/hostfile`.

    Source: Volcano's env and svc plug-ins; Kubeflow's MPI operator, `HOST slots=8` or, for Intel MPI, `HOST:8`.
    """
    named = {name: text for name, text in query.environment.items() if re.fullmatch(r"VC_\w+_HOSTS", name)}
    if query.file is None and named:
        order = sorted(named, key=lambda name: ("MASTER" not in name and "LAUNCHER" not in name, name))
        hosts = [(host, None) for name in order for host in named[name].split(",") if host]
        return _hosts(hosts, query, " and ".join(order))
    path = query.file or Path("/etc/mpi/hostfile")
    return _hosts(_mpi_lines(query.read(path)), query, str(path))


def sky(query: HostQuery) -> Hosts:
    """SkyPilot: `SKYPILOT_NODE_IPS`, one per line, and `SKYPILOT_NUM_GPUS_PER_NODE`."""
    if query.file is not None:
        return _lines(query)
    name, text = _needed(query, "SKYPILOT_NODE_IPS")
    count = query.environment.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
    slots = int(float(count)) if re.fullmatch(r"\d+(\.0+)?", count) else None
    return _hosts([(host, slots) for host in text.split()], query, name)


def ssh_config(query: HostQuery) -> Hosts:
    """OpenSSH: the `Host` lines of `~/.ssh/config` without wildcards; `--match` selects some of them."""
    path = query.file or Path.home() / ".ssh" / "config"
    names = []
    for line in query.read(path).splitlines():
        match = re.match(r"\s*Host(?:\s+|\s*=\s*)(.*)", line, re.IGNORECASE)
        words = match[1].split("#")[0].split() if match else []
        names += [word for word in words if not re.search(r"[*?!]", word)]
    return _hosts([(name, None) for name in names if fnmatchcase(name, query.match or "*")], query, str(path))


def _lines(query: HostQuery) -> Hosts:
    """Returns the hosts of a file with one host per line."""
    assert query.file is not None
    return _hosts([(line, None) for line in _words(query.read(query.file))], query, str(query.file))


def _words(text: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _repeated(text: str) -> list[tuple[str, int | None]]:
    """Returns each host with its number of lines."""
    return list(Counter(word.split()[0] for word in _words(text)).items())


def _mpi_lines(text: str) -> list[tuple[str, int | None]]:
    """Returns the hosts of an MPI hostfile: `HOST slots=8 max_slots=8`, `HOST:8` or `HOST`."""
    counts: list[tuple[str, int | None]] = []
    for line in _words(text):
        host = line.split()[0]
        slots = re.search(r"\bslots\s*=\s*(\d+)", line)
        short = re.fullmatch(r"([^:]+):(\d+)", host)
        count = int(slots[1]) if slots else int(short[2]) if short else None
        counts.append((short[1] if short else host, count))
    return counts


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
