"""What is true about the machines: nodes, GPUs, links, host memory, disks, and where each fact is from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.facts.gpus import Gpu
from dstrain.facts.links import Link
from dstrain.records import type_config


class Origin(StrEnum):
    """Where a fact is from."""

    GIVEN = "given"
    MEASURED = "measured"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    __pydantic_config__ = type_config

    num_nodes: int
    """Nodes."""
    gpus_per_node: int
    """GPUs used on each node."""
    gpu: Gpu
    """The GPU."""
    gpu_origin: Origin
    """Whether the GPU was named, read through NVML, or assumed."""
    intra_link: Link
    """The link between GPUs of one node."""
    inter_link: Link
    """The link between nodes, per GPU."""
    host_memory_bytes: int
    """RAM of one node that training may use."""
    host_memory_origin: Origin
    """Where the figure of the RAM is from."""
    nvme_path: str | None
    """Folder on a local NVMe drive of each node, or None."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes together."""
        return self.num_nodes * self.gpus_per_node
