"""What makes a candidate need more memory on the GPU than another one."""

from __future__ import annotations

import sys

from dstrain.choices import Offload
from dstrain.plan.search.search_space import Candidate

Appetite = tuple[float, ...]
"""Numbers of which none makes a candidate need less memory on the GPU for being larger."""


def kind_of(candidate: Candidate) -> object:
    """Returns what candidates have in common whose appetites can be compared.

    Below ZeRO-3 that includes offload, on which the engine's buffers depend, and buckets: smaller ones may leave more
    gradients waiting.
    """
    zero, parallel = candidate.way.zero, candidate.way.parallel
    is_open = zero.stage == 3 and candidate.rung is not None
    buffers = None if is_open else (zero.offload, candidate.rung)
    return zero.stage, buffers, zero.qwz, zero.qgz, parallel.tp, parallel.ep, candidate.way.kernels


def appetite_of(candidate: Candidate) -> Appetite:
    """Returns SP, on which only NCCL's buffers depend, and what blocks depend on: tokens of this rank, layers and
    inputs kept, whole MLPs, buffers, accumulation (for which ZeRO-3 without hpZ has room from the beginning), hpZ, and
    states that stay."""
    zero, checkpointing, sp = candidate.way.zero, candidate.way.checkpointing, candidate.way.parallel.sp
    has_room = zero.stage == 3 and zero.hpz == 1 and candidate.way.model.is_deepspeed
    return (
        sp,
        candidate.micro_batch * candidate.way.batch.seq_len / sp,
        checkpointing.every_n_layers if checkpointing.enabled else sys.maxsize,
        not checkpointing.offload,
        not checkpointing.tiled_mlp,
        candidate.rung or 0,
        candidate.grad_accum > 1 and not has_room,
        zero.hpz,
        list(Offload)[::-1].index(zero.offload),
        -zero.offload_ratio,
    )
