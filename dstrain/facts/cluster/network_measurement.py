"""Results of a network measurement: collective times, bandwidth of pairs of hosts, NCCL's transports.

Bus bandwidth as in nccl-tests: the rate on each link of a ring, independent of collective and number of ranks, and
so comparable with the link's own figure. Source: nccl-tests doc/PERFORMANCE.md
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dstrain.records import type_config

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
"""Names of the collectives."""

_VIA = re.compile(r" via (NET/\w+|P2P|SHM|direct shared memory)(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One collective at one size."""

    __pydantic_config__ = type_config

    name: str
    """`all_reduce` or `all_gather`."""
    num_bytes: int
    """Bytes of the whole tensor: the reduced or the gathered one."""
    seconds: float
    """Time of one call on the slowest rank, the median of several."""
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Simultaneous transfers in both directions between one GPU each of two hosts."""

    __pydantic_config__ = type_config

    first: int
    """Index of one host in the hostfile, from 0."""
    second: int
    bytes_per_s: float
    """Rate in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A collective among the GPUs of one host, while all other hosts run the same."""

    __pydantic_config__ = type_config

    host: int
    """Index of the host in the hostfile, from 0."""
    bus_bytes_per_s: float
    """Bus bandwidth of a large all-gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A measurement of all hosts."""

    __pydantic_config__ = type_config

    backend: str
    """`nccl` or `gloo`."""
    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    """Ranks on each of them."""
    gpu: str | None
    """NVML's name of rank 0's GPU; None on the CPU."""
    gpu_memory_mib: int
    """Its memory, 0 on the CPU."""
    latency_s: float
    """Time of the smallest all-reduce of all ranks."""
    timings: tuple[Timing, ...]
    """Collectives of all ranks."""
    inside: tuple[Inside, ...]
    """Collectives inside each host; none if every host has one GPU."""
    pairs: tuple[Pair, ...]
    ways: tuple[str, ...]
    """NCCL's transports: `NET/IB/GDRDMA`, `NET/Socket`, `P2P`, `SHM`; none if unknown."""
    seconds: float
    """Duration of the measurement."""

    @property
    def num_pairs(self) -> int:
        """Number of pairs of hosts, measured or not."""
        return len(self.hosts) * (len(self.hosts) - 1) // 2

    def largest(self, name: str) -> Timing:
        """Returns the timing of a collective at the largest size."""
        return max((timing for timing in self.timings if timing.name == name), key=lambda timing: timing.num_bytes)

    @property
    def inside_bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth inside the slowest host; None if every host has one rank."""
        if len(self.hosts) == 1:
            return self.largest(ALL_GATHER).bus_bytes_per_s
        return min((inside.bus_bytes_per_s for inside in self.inside), default=None)

    @property
    def between_bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth over all GPUs of all hosts; None for one host."""
        return self.largest(ALL_GATHER).bus_bytes_per_s if len(self.hosts) > 1 else None

    @property
    def usual_pair_bytes_per_s(self) -> float | None:
        """Expected rate of a pair: the median, or the fastest with up to four hosts, where one bad host slows half of
        the pairs."""
        rates = [pair.bytes_per_s for pair in self.pairs]
        if not rates:
            return None
        return max(rates) if len(self.hosts) < MEDIAN_FROM_HOSTS else median(rates)


MEDIAN_FROM_HOSTS = 5
"""Smallest number of hosts with which one bad host slows a minority of pairs."""


def bus_bytes_per_s(name: str, num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Returns the bus bandwidth: bytes over seconds, times 2 (n - 1) / n for an all-reduce, (n - 1) / n for the others.

    Source: nccl-tests doc/PERFORMANCE.md

    >>> bus_bytes_per_s("all_reduce", 8e9, 1.0, 8), bus_bytes_per_s("all_gather", 8e9, 1.0, 8)
    (14000000000.0, 7000000000.0)
    """
    share = (num_ranks - 1) / num_ranks
    return (2 if name == ALL_REDUCE else 1) * share * num_bytes / seconds


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns the rounds of a round-robin tournament by the circle method: 0 keeps its place, the others rotate.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places = [*range(count), *([-1] if count % 2 else [])]
    schedule = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        schedule.append(sorted((min(pair), max(pair)) for pair in facing if -1 not in pair))
        places = [places[0], places[-1], *places[1:-1]]
    return schedule


def nccl_ways(text: str) -> list[str]:
    """Returns the transports in NCCL's startup log.

    >>> nccl_ways("[0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA")
    ['NET/IB/GDRDMA']
    >>> nccl_ways("[1] NCCL INFO Channel 00 : 0[1b000] -> 7[41000] via direct shared memory")
    ['SHM']
    """
    transports = set()
    for kind, rest in _VIA.findall(text):
        name = "SHM" if kind.startswith("direct") else kind
        transports.add(f"{name}/GDRDMA" if "GDRDMA" in rest else name)
    return sorted(transports)


def rate_text(bytes_per_s: float) -> str:
    """Returns a rate in decimal units, as is usual for links.

    >>> rate_text(42.13e9), rate_text(5.96e6), rate_text(312e9)
    ('42.1 GB/s', '5.96 MB/s', '312 GB/s')
    """
    unit, factor = next(((name, size) for name, size in _UNITS if bytes_per_s >= size), _UNITS[-1])
    value = bytes_per_s / factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}/s"


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def slow_hosts(network: Network, ratio: float) -> list[int]:
    """Returns the hosts whose pairs are all slower than `ratio` times the expected rate; never all hosts."""
    usual = network.usual_pair_bytes_per_s
    if usual is None or len(network.hosts) < 3:
        return []
    best = [_best(network.pairs, host) for host in range(len(network.hosts))]
    return [host for host, rate in enumerate(best) if rate is not None and rate < ratio * usual]


def _best(pairs: Sequence[Pair], host: int) -> float | None:
    return max((pair.bytes_per_s for pair in pairs if host in {pair.first, pair.second}), default=None)
