"""NCCL's own model of how long a collective takes: protocols, rings and trees; its latencies and shares of bandwidth.

Source of every figure: NVIDIA/nccl src/graph/tuning.cc: baseLat, hwLat, ncclTopoTuneModel, ncclTopoGetAlgoTime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Wire(StrEnum):
    """Link between two neighbours of a ring."""

    NVLINK = "NVLink"
    PCIE = "PCIe"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """How data and flags travel: low latency costs bandwidth."""

    hop_s: dict[Wire, float]
    """Seconds from one rank to the next, in a ring or down a tree."""
    bandwidth: float
    """Share of the bus bandwidth."""
    needs_nvlink: bool = False
    """Whether it is used with NVLink alone."""


_RING = (
    _Protocol(hop_s={Wire.NVLINK: 0.47e-6, Wire.PCIE: 1.0e-6, Wire.NETWORK: 2.7e-6}, bandwidth=1 / 4),  # LL
    _Protocol(
        hop_s={Wire.NVLINK: 1.9e-6, Wire.PCIE: 2.5e-6, Wire.NETWORK: 4.0e-6}, bandwidth=0.92, needs_nvlink=True
    ),  # LL128
    _Protocol(hop_s={Wire.NVLINK: 3.4e-6, Wire.PCIE: 5.7e-6, Wire.NETWORK: 9.6e-6}, bandwidth=1.0),  # Simple
)
_TREE = (
    _Protocol(hop_s={Wire.NVLINK: 0.52e-6, Wire.PCIE: 1.0e-6, Wire.NETWORK: 5.0e-6}, bandwidth=0.9 / 3.8),
    _Protocol(
        hop_s={Wire.NVLINK: 1.2e-6, Wire.PCIE: 1.9e-6, Wire.NETWORK: 8.5e-6}, bandwidth=0.9 * 0.915, needs_nvlink=True
    ),
    _Protocol(hop_s={Wire.NVLINK: 28e-6, Wire.PCIE: 28e-6, Wire.NETWORK: 50e-6}, bandwidth=0.9),
)

START_S = 20e-6
"""Time of the smallest collective before its first hop, launch and wait included. Source: nccl-tests of 8 bytes take
some 25 µs on eight A100, from memory, and 40 to 42 µs on eight RTX 4090 (nccl#1530), hops included."""


def collective_s(nbytes: float, bus_bytes_per_s: float, *, ranks: int, nodes: int, passes: int, wire: Wire) -> float:
    """Returns the seconds of one collective by the best protocol.

    `nbytes` is the whole tensor; `passes` is 1 for a gather or a scatter, 2 for an all-reduce, which may go up and down
    a tree instead of twice round the ring. `wire` joins the ranks of a node, on each of `nodes`.
    """
    moved = passes * nbytes * (ranks - 1) / ranks / bus_bytes_per_s
    between = passes * (nodes - 1)
    inside = passes * (ranks - 1) - between
    times = [
        inside * p.hop_s[wire] + between * p.hop_s[Wire.NETWORK] + moved / p.bandwidth
        for p in _RING
        if wire is Wire.NVLINK or not p.needs_nvlink
    ]
    if passes == 2:
        down = ranks / nodes - 1
        levels = math.log2(nodes)
        times += [
            2 * (down * p.hop_s[wire] + levels * p.hop_s[Wire.NETWORK]) + moved / p.bandwidth
            for p in _TREE
            if wire is Wire.NVLINK or not p.needs_nvlink
        ]
    return START_S + min(times)
