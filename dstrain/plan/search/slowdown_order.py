"""Ranks configurations by expected slowdown, for GPUs without performance data."""

from __future__ import annotations

import math

from dstrain.choices import Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.search.buffer_sizes import TIGHT
from dstrain.plan.search.search_space import Candidate

SATURATING_TOKENS = 4096
"""Tokens of a micro-batch from which matrix products run near their best; a smaller one loses speed first.
Source: achievable-FLOP/s sweeps of stas00/ml-engineering (2,048 and more for h of 4,096 and more)."""
LARGEST_TOKENS = 16384
"""Tokens of a micro-batch beyond which larger ones are no faster."""


def lost_speed(cluster: Cluster, candidate: Candidate) -> tuple[float, ...]:
    """Returns the place of a candidate in the order of lost speed, where no time can be predicted.

    Outermost first: what leaves the GPU; SP and TP; micro-batches from the one that saturates the GPU down to 1;
    without and with checkpointing, of few layers first, and with inputs that stay; the stages, ZeRO-1 before 2 where it
    reduces less often, ZeRO-0 last; roomy and then tight buffers; then larger micro-batches, up to `LARGEST_TOKENS`.
    """
    way = candidate.way
    tokens = way.batch.seq_len / way.parallel.sp
    saturating = 2 ** max(0, math.ceil(math.log2(SATURATING_TOKENS / tokens)))
    stages = (1, 2, 3, 0) if candidate.grad_accum > 1 and cluster.num_gpus > 1 else (2, 1, 3, 0)
    return (
        candidate.micro_batch * tokens > LARGEST_TOKENS and candidate.micro_batch > 1,
        list(Offload).index(way.zero.offload),
        way.parallel.sp * way.parallel.tp,
        -min(candidate.micro_batch, saturating),
        way.checkpointing.enabled,
        -way.checkpointing.every_n_layers,
        way.checkpointing.offload,
        way.checkpointing.tiled_mlp,
        stages.index(way.zero.stage),
        way.zero.hpz,
        way.zero.offload_ratio,
        candidate.rung == TIGHT,
        not candidate.pin_memory,
        -candidate.micro_batch,
    )
