"""What makes a candidate need more memory on the GPU than another one."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from operator import ge

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
    return zero.stage, buffers, zero.qwz, parallel.tp, parallel.ep, candidate.way.kernels


def appetite_of(candidate: Candidate) -> Appetite:
    """Returns SP, on which only NCCL's buffers depend, and what blocks depend on: tokens of this rank, layers and
    inputs kept, whole MLPs, buffers, accumulation (for which ZeRO-3 without hpZ has room from the beginning), hpZ, and
    states that stay."""
    zero, checkpointing, sp = candidate.way.zero, candidate.way.checkpointing, candidate.way.parallel.sp
    has_room = zero.stage == 3 and zero.hpz == 1
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


class Failures:
    """What candidates that do not fit say of others of their kind."""

    def __init__(self) -> None:
        self.too_large: dict[object, list[Appetite]] = defaultdict(list)
        """Appetites of candidates that live in more than the GPU has."""
        self.too_scattered: dict[object, list[Appetite]] = defaultdict(list)
        """Appetites of candidates for which the allocator takes a little more than the GPU has."""
        self.overflowing: dict[object, list[Candidate]] = defaultdict(list)
        """Candidates for which the allocator takes more than may be used, by how much is not known."""

    def forget(self) -> None:
        """Forgets all but what was replayed."""
        self.too_large.clear()
        self.too_scattered.clear()

    def say_enough(self, candidate: Candidate) -> bool:
        """Returns whether one that needs no more bytes was too large, or one that allocates the same blocks was."""
        kind, appetite = kind_of(candidate), appetite_of(candidate)
        if any(all(map(ge, appetite, least)) for least in self.too_large[kind]):
            return True
        if any(_has_blocks_of(appetite, same) for same in self.too_scattered[kind]):
            return True
        return any(appetite == appetite_of(same) for same in self.overflowing[kind])

    def to_verify(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields those that overflow and allocate the same blocks, on fewer ranks: how much they hold matters."""
        kind, appetite = kind_of(candidate), appetite_of(candidate)
        for other in self.overflowing[kind]:
            if appetite[0] > other.way.parallel.sp and _has_blocks_of(appetite, appetite_of(other)):
                yield other


def _has_blocks_of(appetite: Appetite, other: Appetite) -> bool:
    return appetite[1:] == other[1:] and appetite[0] >= other[0]
