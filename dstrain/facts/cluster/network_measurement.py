"""Result of a network measurement: the time of an all-reduce at growing sizes.

Bus bandwidth, as nccl-tests define it, is the rate on each link of a ring, independent of the number of ranks, and so
comparable with the link's own figure. Source: nccl-tests doc/PERFORMANCE.md
"""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All-reduces of one size."""

    __pydantic_config__ = type_config

    num_bytes: int
    """Bytes of the reduced tensor."""
    seconds: float
    """Time of one call on the slowest rank, the median of several."""
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A measurement over all ranks of all hosts."""

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
    """Time of the smallest all-reduce."""
    timings: tuple[Timing, ...]
    """From the smallest size to the largest one."""
    seconds: float
    """Duration of the measurement."""

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth of the largest all-reduce."""
        return self.timings[-1].bus_bytes_per_s


def bus_bytes_per_s(num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Returns the bus bandwidth of an all-reduce: bytes over seconds, times 2 (n - 1) / n.

    Source: nccl-tests doc/PERFORMANCE.md

    >>> bus_bytes_per_s(8e9, 1.0, 8)
    14000000000.0
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


def rate_text(bytes_per_s: float) -> str:
    """Returns a rate in decimal units, as is usual for links.

    >>> rate_text(42.13e9), rate_text(5.96e6), rate_text(312e9)
    ('42.1 GB/s', '5.96 MB/s', '312 GB/s')
    """
    unit, factor = next(((name, size) for name, size in _UNITS if bytes_per_s >= size), _UNITS[-1])
    value = bytes_per_s / factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}/s"


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
