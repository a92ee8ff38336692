"""The launchers for several nodes: what each one needs, and which node starts what."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.errors import EnvironmentProblem, InvalidConfig, did_you_mean
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.launch import command, remote
from dstrain.launch.command import LaunchSite
from dstrain.launch.nodes.connection import Channel, agent, here
from dstrain.launch.nodes.layout import Node, from_one_launcher, per_node
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One way to start ranks on several nodes."""

    needs: str
    """The program that must be installed on this machine."""
    package: str
    """The Debian package that contains it."""
    nodes: Callable[[LaunchSite], tuple[Node, ...]]
    """Returns the nodes and their commands."""
    equal_slots: bool = False
    """Whether all nodes must have the same number of slots."""
    is_mpi: bool = False
    """Whether ranks get their number from MPI."""
    has_one_environment: bool = True
    """Whether the ranks of all nodes get the same variables."""


def _node_by_node(site: LaunchSite) -> tuple[Node, ...]:
    lines = [command.of_node(site, number) for number in range(len(site.hosts.hosts))]
    return per_node(site.hosts, lines, site.here)


def _from_here(line: Callable[[LaunchSite], list[str]]) -> Callable[[LaunchSite], tuple[Node, ...]]:
    return lambda site: from_one_launcher(site.hosts, line(site), site.here)


_PDSH = _from_here(command.pdsh)
_OPENMPI = _from_here(lambda site: command.mpi(site, "openmpi"))
_MPICH = _from_here(lambda site: command.mpi(site, "mpich"))
LAUNCHERS: Mapping[str, Launcher] = MappingProxyType(
    {
        "pdsh": Launcher(needs="pdsh", package="pdsh", nodes=_PDSH),
        "ssh": Launcher(needs="ssh", package="openssh-client", nodes=_node_by_node, has_one_environment=False),
        "openmpi": Launcher(needs="ompi_info", package="openmpi-bin", nodes=_OPENMPI, is_mpi=True),
        "mpich": Launcher(needs="mpirun", package="mpich", nodes=_MPICH, equal_slots=True, is_mpi=True),
        "slurm": Launcher(needs="srun", package="slurm-client", nodes=_node_by_node, has_one_environment=False),
    }
)
"""Every launcher by name."""


def choose(name: str | None, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns the launcher to use and what to say about the choice, or None.

    Raises InvalidConfig for an unknown name, EnvironmentProblem if its program is missing.
    """
    if name is None:
        if _has("pdsh", environment):
            return "pdsh", None
        require("ssh", environment)
        return "ssh", "pdsh is not installed; the nodes are started over plain ssh (--launcher ssh)"
    if name not in LAUNCHERS:
        raise InvalidConfig(f'--launcher "{name}": no such launcher', hint=did_you_mean(name, list(LAUNCHERS)))
    require(name, environment)
    if name == "slurm" and "SLURM_JOB_ID" not in environment:
        raise EnvironmentProblem(
            "--launcher slurm: this is not a SLURM allocation (SLURM_JOB_ID is not set)",
            hint="salloc --nodes 2 --gpus-per-node 8, then run here; or `dstrain script slurm` writes a batch script.",
        )
    return name, None


def require(name: str, environment: Mapping[str, str]) -> None:
    """Raises EnvironmentProblem when a launcher's program is not installed on this machine."""
    launcher = LAUNCHERS[name]
    if not _has(launcher.needs, environment):
        others = [other for other in ("ssh", "pdsh") if other != name and _has(LAUNCHERS[other].needs, environment)]
        instead = f", or use --launcher {others[0]}" if others else ""
        raise EnvironmentProblem(
            f"--launcher {name}: {launcher.needs} is not installed", hint=f"apt-get install {launcher.package}{instead}"
        )


def _has(program: str, environment: Mapping[str, str]) -> bool:
    return shutil.which(program, path=environment.get("PATH")) is not None


def check_hosts(name: str, hosts: Hosts) -> None:
    """Raises InvalidConfig for hosts that a launcher cannot take."""
    first = hosts.hosts[0].name
    if len(hosts.hosts) > 1 and (first.startswith(("localhost", "127.")) or first == "::1"):
        raise InvalidConfig(
            f"{hosts.name}: rank 0 is on {first}, which every node resolves to itself",
            hint="Write this machine's name or address there, as the other nodes know it.",
        )
    counts = Counter(host.slots for host in hosts.hosts)
    if LAUNCHERS[name].equal_slots and len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        rows = [f"{host.name} has {counted(host.slots, 'slot')}" for host in hosts.hosts if host.slots != usual]
        raise InvalidConfig(
            f"{hosts.name}: --launcher {name} needs {counted(usual, 'slot')} on every host; {', '.join(rows)}",
            hint="Make them equal, or use --launcher pdsh or ssh.",
        )


def connect(name: str, nodes: Sequence[Node], environment: Mapping[str, str], python_path: str) -> list[Channel]:
    """Opens the connections to the agents of some nodes; srun has one for all of them."""
    if name == "slurm":
        numbers = {node.host: node.number for node in nodes}
        word = ",".join(f"{host}={number}" for host, number in numbers.items())
        line = remote.srun(list(numbers), agent(word, python_path))
        return [Channel(line, environment, list(numbers.values()))]
    return [
        Channel(
            here(node.number) if node.is_here else remote.on_host(node.host, agent(str(node.number), python_path)),
            environment if node.is_here else os.environ,
            [node.number],
        )
        for node in nodes
    ]
