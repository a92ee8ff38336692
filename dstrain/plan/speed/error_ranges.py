"""How far predicted step times are off, by kind of question: from published runs on which no constant was set."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.facts.cluster.cluster import Cluster


class Extent(StrEnum):
    """How many GPUs a run has."""

    ONE_GPU = "one GPU"
    ONE_NODE = "one node"
    SEVERAL_NODES = "several nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRange:
    """One kind of question: A100, A800 and H100 with NVLink, and InfiniBand or RoCE between nodes."""

    extent: Extent
    """How many GPUs."""
    is_full: bool
    """Whether the whole model trains; else an adapter."""
    ratio: float
    """Error that 80 % of the predictions stay within, over the measured throughput; each published table counts as
    much as any other."""
    runs: int
    """Published runs of the kind."""
    tables: int
    """Tables that they are from."""


ERROR_RANGES = (
    ErrorRange(extent=Extent.ONE_GPU, is_full=False, ratio=0.1, runs=23, tables=2),
    ErrorRange(extent=Extent.ONE_GPU, is_full=True, ratio=0.07, runs=12, tables=2),
    ErrorRange(extent=Extent.ONE_NODE, is_full=False, ratio=0.09, runs=48, tables=2),
    ErrorRange(extent=Extent.ONE_NODE, is_full=True, ratio=0.08, runs=68, tables=5),
    ErrorRange(extent=Extent.SEVERAL_NODES, is_full=True, ratio=0.1, runs=47, tables=3),
)
"""Source: `python benchmarks/predict.py --ranges`; tests/test_published.py compares."""


def extent(cluster: Cluster) -> Extent:
    """Returns how many GPUs a cluster has, in words."""
    if cluster.num_gpus == 1:
        return Extent.ONE_GPU
    return Extent.ONE_NODE if cluster.num_nodes == 1 else Extent.SEVERAL_NODES


def error_ratio(cluster: Cluster, *, is_full: bool) -> float | None:
    """Returns the range of a kind of question that published runs have, or None for any other.

    Other cards, and GPUs of a node that PCIe joins, have too few runs.
    """
    if not is_compared(cluster):
        return None
    kind = (extent(cluster), is_full)
    return next((found.ratio for found in ERROR_RANGES if (found.extent, found.is_full) == kind), None)


def is_compared(cluster: Cluster) -> bool:
    """Returns whether the GPUs are of a generation, and joined as those, that published runs cover."""
    return cluster.gpu.link.startswith("nvlink") and cluster.gpu.compute_capability in ((8, 0), (9, 0))
