"""Says what the links of a plan need for a collective that a rank measured."""

from __future__ import annotations

from contextlib import suppress

from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import measured_workload
from dstrain.monitor.traffic import Expected, Kind, Message
from dstrain.plan.speed.collectives import Collective, Phase
from dstrain.plan.speed.efficiency import Efficiency, efficiency


def link_seconds(model: ModelFacts | None, cluster: Cluster | None) -> Expected | None:
    """Returns what tells the seconds of a message by the planner's rates: calibrated, measured, or the data sheet's.

    None if machines are unknown, or if their ranks are CPUs whose links nobody measured.
    """
    if model is None or cluster is None or (cluster.gpu.is_cpu and not _is_measured(cluster)):
        return None
    with suppress(DstrainError):  # of a damaged calibration, which `dstrain run` reports
        rates = efficiency(cluster, measured_workload(model, cluster).measured)
        return lambda message: _seconds(message, cluster, rates)
    return None


def _is_measured(cluster: Cluster) -> bool:
    origin = cluster.intra_link_origin if cluster.num_nodes == 1 else cluster.inter_link_origin
    return origin is Origin.MEASURED


def _seconds(message: Message, cluster: Cluster, rates: Efficiency) -> float | None:
    """Returns the seconds of a message; None for a kind that the planner does not know."""
    if message.kind is Kind.OTHER or len(message.ranks) < 2:
        return None
    collective = Collective(
        phase=Phase.STEP,
        num_bytes=message.num_bytes,
        messages=1,
        ranks=len(message.ranks),
        passes=2 if message.kind is Kind.ALL_REDUCE else 1,
        stride=message.ranks[1] - message.ranks[0],
        is_ring=message.kind is not Kind.ALL_TO_ALL,
    )
    return collective.seconds(cluster, rates)
