"""Machines that plans are made for."""

from __future__ import annotations

from typing import Any

from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Origin, link


def cluster(num_gpus: int = 8, gpu: str = "h100-sxm", inter: str | None = None, **more: Any) -> Cluster:
    """Returns so many GPUs of a name, on nodes that a link of a name joins."""
    inter_link = None if inter is None else link(inter)
    return clusters.describe(gpu=gpus.gpu(gpu), gpu_origin=Origin.GIVEN, gpus=num_gpus, inter_link=inter_link, **more)
