"""The workload of a plan: the model, the machines, the rows, and measurements on machines like them.

Every verb gets its measurements here, so that all of them say the same of one configuration.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge, Le

from dstrain.facts.cluster import calibration, measured_links
from dstrain.facts.cluster.calibration import LINK_RATES, Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster, Origin, link, link_assumed_between_nodes
from dstrain.facts.cluster.hostfile import Hosts
from dstrain.facts.cluster.measured_links import nominal_name
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, and the machines that train it."""

    model: ModelFacts
    cluster: Cluster
    calibration: Calibration = field(default_factory=Calibration)
    """Measurements that replace the planner's priors; empty by default."""
    contents: RowContents | None = None
    """Contents of a row; None: one full-length sample with a label on every token."""

    @property
    def measured(self) -> Measured:
        """The measurements of the cluster's GPU and links."""
        return self.calibration.of(self.cluster.gpu.name).on(**self.links)

    @property
    def links(self) -> dict[str, str]:
        """The names of the cluster's links: fields of `Measured` that name one → names in the table of links."""
        return {name: nominal_name(getattr(self.cluster, name)) for name in LINK_RATES}


def measured_workload(model: ModelFacts, cluster: Cluster, contents: RowContents | None = None) -> Workload:
    """Returns the workload with the user's calibration and the measured links of a cluster (`measured_cluster`).

    Raises InvalidConfig if the calibration file is damaged.
    """
    rates = measured_links.with_rates(calibration.read(), cluster)
    return Workload(model=model, cluster=cluster, calibration=rates, contents=contents)


def measured_cluster(cluster: Cluster, hosts: Hosts | None) -> tuple[Cluster, str | None]:
    """Returns the cluster with the links that `dstrain doctor --network` measured on its hosts, as far as it did, and
    a note about an unreadable file, which is ignored.

    A link that was measured for an earlier plan is looked up again; one that was given stays. Without hosts it is this
    machine if its GPU was measured, or else no known one.
    """
    cluster = _unmeasured(cluster)
    is_here = cluster.num_nodes == 1 and (cluster.gpu_origin is Origin.MEASURED or cluster.gpu.is_cpu)
    if hosts is None and not is_here:
        return cluster, None
    entries, problem = measured_links.read()
    names = measured_links.names([host.name for host in hosts.hosts] if hosts else ["localhost"], socket.gethostname())
    links_here = measured_links.find(entries, names, gpu=cluster.gpu.name, gpus_per_node=cluster.gpus_per_node)
    return measured_links.with_links(cluster, links_here) if links_here is not None else cluster, problem


def _unmeasured(cluster: Cluster) -> Cluster:
    """Returns the cluster with assumed links in place of measured ones."""
    if cluster.intra_link_origin is Origin.MEASURED:
        cluster = replace(cluster, intra_link=link(cluster.gpu.link), intra_link_origin=Origin.ASSUMED)
    if cluster.inter_link_origin is Origin.MEASURED:
        inter = link_assumed_between_nodes(cluster.gpu)
        cluster = replace(cluster, inter_link=inter, inter_link_origin=Origin.ASSUMED)
    return cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContents:
    """Contents of training rows."""

    __pydantic_config__ = type_config

    sample_tokens: Annotated[float, Ge(1)]
    """Mean tokens of a sample."""
    attended_tokens: Annotated[float, Ge(1)]
    """Mean tokens of the sample that a token is in: squared lengths over lengths. Attention costs as much as that."""
    target_share: Annotated[float, Ge(0), Le(1)]
    """Share of tokens with a label, 0…1."""


def seen_samples(seq_len: int, image_patches: int, patches_per_token: int, *, is_packed: bool) -> int:
    """Returns the samples whose images a row holds at most: one, in packed rows as many as fill it without any text.

    `image_patches`: patches of all images of a sample.

    >>> seen_samples(4096, 1024, 4, is_packed=True)
    16
    """
    return max(1, seq_len * patches_per_token // image_patches) if is_packed and image_patches else 1
