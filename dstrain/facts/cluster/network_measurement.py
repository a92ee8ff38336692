"""Results of a network measurement: collective times, bandwidth of pairs of hosts, NCCL's transports.

Bus bandwidth is what nccl-tests means by it: the rate at which each link of a ring is used, whatever the collective and
however many ranks, so that it can be held against the link's own figure. Source: nccl-tests doc/PERFORMANCE.md
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dstrain.records import type_config

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
"""Names of what is timed."""

_VIA = re.compile(r" via (NET/\w+|P2P|SHM|direct shared memory)(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One collective at one size."""

    __pydantic_config__ = type_config

    name: str
    """`all_reduce` or `all_gather`."""
    num_bytes: int
    """Bytes of the whole tensor: what is reduced, or what every rank has after gathering."""
    seconds: float
    """Time of one call, the slowest rank's; the median of several."""
    bus_bytes_per_s: float
    """Bus bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts that sent each other something, one GPU of each, both ways at once."""

    __pydantic_config__ = type_config

    first: int
    """Number of one host, in the hostfile's order."""
    second: int
    """Number of the other one."""
    bytes_per_s: float
    """Bytes per second in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The GPUs of one host among themselves, while those of the others do the same."""

    __pydantic_config__ = type_config

    host: int
    """Number of the host, in the hostfile's order."""
    bus_bytes_per_s: float
    """Bus bandwidth of a large all-gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What was measured."""

    __pydantic_config__ = type_config

    backend: str
    """`nccl` or `gloo`."""
    hosts: tuple[str, ...]
    """The hosts by name."""
    slots: tuple[int, ...]
    """Ranks on each of them."""
    gpu: str | None
    """What NVML calls the GPU of rank 0; None on the CPU."""
    gpu_memory_mib: int
    """Its memory, 0 on the CPU."""
    latency_s: float
    """Time of the smallest all-reduce of all ranks."""
    timings: tuple[Timing, ...]
    """Collectives of all ranks, by name and size."""
    inside: tuple[Inside, ...]
    """GPUs of one host among themselves; nothing where each has one."""
    pairs: tuple[Pair, ...]
    """Pairs of hosts."""
    ways: tuple[str, ...]
    """The transports that NCCL took: `NET/IB/GDRDMA`, `NET/Socket`, `P2P`, `SHM`; nothing where that is not known."""
    seconds: float
    """How long measuring took."""

    @property
    def num_pairs(self) -> int:
        """Pairs that there are, measured or not."""
        return len(self.hosts) * (len(self.hosts) - 1) // 2

    def largest(self, name: str) -> Timing:
        """Returns the timing of a collective at the largest size."""
        return max((each for each in self.timings if each.name == name), key=lambda each: each.num_bytes)

    @property
    def inside_bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth inside a host, of the slowest one; None where each host has one rank."""
        if len(self.hosts) == 1:
            return self.largest(ALL_GATHER).bus_bytes_per_s
        return min((each.bus_bytes_per_s for each in self.inside), default=None)

    @property
    def between_bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth over all hosts, all GPUs taking part; None for one host."""
        return self.largest(ALL_GATHER).bus_bytes_per_s if len(self.hosts) > 1 else None

    @property
    def usual_pair_bytes_per_s(self) -> float | None:
        """What a pair should reach: the median; with up to four hosts, where one bad host spoils half of the pairs, the
        fastest."""
        rates = [pair.bytes_per_s for pair in self.pairs]
        if not rates:
            return None
        return max(rates) if len(self.hosts) < MEDIAN_FROM_HOSTS else median(rates)


MEDIAN_FROM_HOSTS = 5
"""Hosts from which most pairs are sound though one host is not."""


def bus_bytes_per_s(name: str, num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Returns the bus bandwidth: bytes over seconds, times 2 (n - 1) / n for an all-reduce, (n - 1) / n for the others.

    Source: nccl-tests doc/PERFORMANCE.md

    >>> bus_bytes_per_s("all_reduce", 8e9, 1.0, 8), bus_bytes_per_s("all_gather", 8e9, 1.0, 8)
    (14000000000.0, 7000000000.0)
    """
    share = (num_ranks - 1) / num_ranks
    return (2 if name == ALL_REDUCE else 1) * share * num_bytes / seconds


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns the rounds of a tournament: in each of them everybody meets at most one other, in all everybody once.

    The circle method: number 0 stays, the others move on by one place.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        met = [(min(pair), max(pair)) for pair in facing if -1 not in pair]
        found.append(sorted(met))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def nccl_ways(text: str) -> list[str]:
    """Returns the transports that NCCL's log of its start names.

    >>> nccl_ways("[0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA")
    ['NET/IB/GDRDMA']
    >>> nccl_ways("[1] NCCL INFO Channel 00 : 0[1b000] -> 7[41000] via direct shared memory")
    ['SHM']
    """
    found = set()
    for kind, rest in _VIA.findall(text):
        name = "SHM" if kind.startswith("direct") else kind
        found.add(f"{name}/GDRDMA" if "GDRDMA" in rest else name)
    return sorted(found)


def rate_text(bytes_per_s: float) -> str:
    """Returns a rate as people write that of a link, in decimal units.

    >>> rate_text(42.13e9), rate_text(5.96e6), rate_text(312e9)
    ('42.1 GB/s', '5.96 MB/s', '312 GB/s')
    """
    unit, factor = next(((name, size) for name, size in _UNITS if bytes_per_s >= size), _UNITS[-1])
    value = bytes_per_s / factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}/s"


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def slow_hosts(network: Network, ratio: float) -> list[int]:
    """Returns the hosts of which every pair is slower than `ratio` times the usual one; never all hosts."""
    usual = network.usual_pair_bytes_per_s
    if usual is None or len(network.hosts) < 3:
        return []
    best = [_best(network.pairs, host) for host in range(len(network.hosts))]
    return [host for host, rate in enumerate(best) if rate is not None and rate < ratio * usual]


def _best(pairs: Sequence[Pair], host: int) -> float | None:
    return max((pair.bytes_per_s for pair in pairs if host in {pair.first, pair.second}), default=None)
