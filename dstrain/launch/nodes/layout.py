"""Lays out a run: which node starts a launcher, and which ranks it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstrain.facts.cluster.hostfile import Hosts

HEAD = -1
"""Number of the machine that starts a launcher for others and has no rank itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a run."""

    number: int
    """Its place in the hostfile; `HEAD` for one that is not in it."""
    host: str
    """Its name in the hostfile."""
    is_here: bool
    command: tuple[str, ...] | None
    """The launcher that it starts; None where another one starts its ranks."""
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def per_node(hosts: Hosts, commands: Sequence[Sequence[str] | None], here: Sequence[bool]) -> tuple[Node, ...]:
    """Returns the nodes of a run; `commands` and `here` are in the order of the hosts."""
    return tuple(
        Node(
            number=number,
            host=host.name,
            is_here=here[number],
            command=None if command is None else tuple(command),
            first_rank=first,
            num_ranks=host.slots,
        )
        for number, (host, command, first) in enumerate(zip(hosts.hosts, commands, first_ranks(hosts), strict=True))
    )


def from_one_launcher(hosts: Hosts, command: Sequence[str], here: Sequence[bool]) -> tuple[Node, ...]:
    """Returns the nodes of a run in which one launcher on this machine starts all ranks."""
    nodes = per_node(hosts, [command if is_here else None for is_here in here], here)
    if any(here):
        return nodes
    head = Node(number=HEAD, host="launcher", is_here=True, command=tuple(command), first_rank=0, num_ranks=0)
    return (*nodes, head)


def first_ranks(hosts: Hosts) -> list[int]:
    """Returns the number of each host's first rank: the launcher numbers ranks by host, in the hostfile's order."""
    firsts, total = [], 0
    for host in hosts.hosts:
        firsts.append(total)
        total += host.slots
    return firsts
