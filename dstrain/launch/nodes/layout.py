"""Lays out a run: its nodes, the launcher that each of them starts, and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import Hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a run."""

    number: int
    """Its place in the hostfile."""
    host: str
    """Its name in the hostfile."""
    is_here: bool
    command: tuple[str, ...]
    """The launcher that it starts."""
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def per_node(hosts: Hosts, commands: Sequence[Sequence[str]], here: Sequence[bool]) -> tuple[Node, ...]:
    """Returns the nodes of a run; `commands` and `here` are in the order of the hosts."""
    return tuple(
        Node(
            number=number,
            host=host.name,
            is_here=here[number],
            command=tuple(command),
            first_rank=first,
            num_ranks=host.slots,
        )
        for number, (host, command, first) in enumerate(zip(hosts.hosts, commands, first_ranks(hosts), strict=True))
    )


def first_ranks(hosts: Hosts) -> list[int]:
    """Returns the number of each host's first rank: the launcher numbers ranks by host, in the hostfile's order."""
    firsts, total = [], 0
    for host in hosts.hosts:
        firsts.append(total)
        total += host.slots
    return firsts


def check_hosts(hosts: Hosts) -> None:
    """Raises InvalidConfig if the other nodes cannot find rank 0 by its name."""
    first = hosts.hosts[0].name
    if len(hosts.hosts) > 1 and (first.startswith(("localhost", "127.")) or first == "::1"):
        raise InvalidConfig(
            f"{hosts.name}: rank 0 is on {first}, which every node resolves to itself",
            hint="Write this machine's name or address there, as the other nodes know it.",
        )
