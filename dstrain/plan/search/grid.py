"""The best plan of questions near the one asked: other numbers of GPUs, sequence lengths and micro-batches."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster, resized
from dstrain.facts.workload import Workload
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.request import Request
from dstrain.plan.search.decide import choice

FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Multiples of the GPUs and of the sequence length that were asked for; the first few that are possible count."""
NUM_CLUSTERS, NUM_SEQ_LENS = 4, 3
"""How many values GPUs and sequence length have: a point takes about a second of one core."""
MICRO_BATCHES = (1, 2, 4)
"""Beside the one that was asked for, and the planner's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Values whose combinations are planned: at most 4 × 3 × 5."""

    seq_len: tuple[int, ...]
    """Tokens of the longest sample."""
    micro_batch: tuple[int | None, ...]
    """Samples of one forward of one GPU; None: chosen by the planner."""
    clusters: tuple[Cluster, ...]
    """Machines with different numbers of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination, and the answer to it."""

    seq_len: int
    micro_batch: int | None
    cluster: Cluster
    answer: Estimate | InvalidConfig
    """The best plan that fits, else the nearest; or how the options contradict each other."""


def axes(workload: Workload, request: Request, asked: Estimate, *, gpus_per_node: int | None) -> Axes:
    """Returns values around the question whose answer is `asked`: GPUs that fill nodes of `gpus_per_node` (None: of the
    same size, or as `--gpus` alone means them), and no more tokens than the model can read."""
    cluster, longest = workload.cluster, workload.model.max_position_embeddings
    seq_lens = _multiples(asked.configuration.batch.seq_len)
    clusters = []
    for gpus in _multiples(cluster.num_gpus):
        with suppress(InvalidConfig):
            is_same = gpus == cluster.num_gpus
            clusters.append(cluster if is_same else resized(cluster, gpus, gpus_per_node=gpus_per_node))
    return Axes(
        seq_len=tuple(tokens for tokens in seq_lens if tokens <= longest)[:NUM_SEQ_LENS],
        micro_batch=(None, *sorted({*MICRO_BATCHES, request.micro_batch or 1})),
        clusters=tuple(clusters[:NUM_CLUSTERS]),
    )


def points(workload: Workload, request: Request, asked: Estimate, values: Axes) -> tuple[Point, ...]:
    """Returns every combination of the values with its answer, as to a question of its own, which for `asked` is known.

    What does not fit is a quick estimate.
    """
    question = (asked.configuration.batch.seq_len, request.micro_batch, workload.cluster)
    found = []
    for cluster, seq_len, micro_batch in product(values.clusters, values.seq_len, values.micro_batch):
        answer: Estimate | InvalidConfig = asked
        if (seq_len, micro_batch, cluster) != question:
            changed = replace(request, seq_len=seq_len, micro_batch=micro_batch)
            try:
                answer = choice(replace(workload, cluster=cluster), changed)
            except InvalidConfig as error:
                answer = error
        found.append(Point(seq_len=seq_len, micro_batch=micro_batch, cluster=cluster, answer=answer))
    return tuple(found)


def _multiples(count: int) -> list[int]:
    return [int(count * factor) for factor in FACTORS if (count * factor).is_integer()]
