"""Configurations worth measuring against the present one: the plan's best, which differ in kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.request import Request
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import search
from dstrain.plan.search.search_space import (
    batches,
    data_parallel_ranks,
    global_batch,
    strategy_key,
    with_batch,
)


def contenders(workload: Workload, request: Request, present: Estimate, count: int) -> tuple[Estimate, ...]:
    """Returns up to `count` configurations, the present one first, each with the same global batch.

    The best strategies by the plan (ZeRO stage, offload, recomputation, parallelism), each with its best micro-batch;
    after every two of them the nearest other micro-batch of the best one. All but the present one fit by the plan.
    Raises InvalidConfig if the request contradicts itself.
    """
    ranking = search(workload, request, top=count)
    plans = [plan for plan in ranking.plans if plan.fits] if ranking.fits else []
    batched = list(_other_batches(workload, request, plans[0])) if plans else []
    in_turn = chain.from_iterable(zip_longest(plans[::2], plans[1::2], batched))
    by_kind: dict[tuple[object, ...], Estimate] = {}
    for estimate in (present, *in_turn):
        if estimate is not None:
            by_kind.setdefault(_kind(estimate.configuration), estimate)
    return tuple(by_kind.values())[:count]


def with_fastest_batch(workload: Workload, estimate: Estimate, measured: Sequence[tuple[Estimate, float]]) -> Estimate:
    """Returns a configuration with the micro-batch of the fastest one that was measured, each with its seconds.

    That is where it beat another micro-batch of its strategy, which is taken to hold for other strategies too. The
    global batch stays; where that cannot be, or does not fit, the configuration stays.
    """
    if not measured:
        return estimate
    chosen, best = estimate.configuration, min(measured, key=lambda pair: pair[1])[0].configuration
    sizes = {
        one.configuration.batch.micro_batch
        for one, _ in measured
        if strategy_key(one.configuration) == strategy_key(best)
    }
    ranks, samples = data_parallel_ranks(workload.cluster, chosen), global_batch(workload.cluster, chosen)
    micro_batch = best.batch.micro_batch
    if len(sizes) < 2 or strategy_key(chosen) == strategy_key(best) or samples % (ranks * micro_batch):
        return estimate
    other = with_batch(chosen, micro_batch, samples // (ranks * micro_batch))
    if other == chosen or broken(workload, other):
        return estimate
    assessed = assess(workload, other)
    return assessed if assessed.fits else estimate


def _kind(c: Configuration) -> tuple[object, ...]:
    """Returns the identity of a configuration without the sizes of its buffers."""
    batch = c.batch.micro_batch, c.step.grad_accum
    return *strategy_key(c), c.kernels.torch_compile, c.checkpointing.every_n_layers, *batch


def _other_batches(workload: Workload, request: Request, best: Estimate) -> Iterator[Estimate]:
    """Yields a plan with other micro-batches and the same global batch, the nearest first, as far as they fit."""
    chosen = best.configuration
    if request.micro_batch is not None:
        return
    pairs = batches(replace(request, grad_accum=None), data_parallel_ranks(workload.cluster, chosen))
    for micro_batch, grad_accum in sorted(pairs, key=lambda pair: _distance(pair[0], chosen.batch.micro_batch)):
        other = with_batch(chosen, micro_batch, grad_accum)
        if micro_batch != chosen.batch.micro_batch and not broken(workload, other):
            estimate = assess(workload, other)
            if estimate.fits:
                yield estimate


def _distance(one: int, other: int) -> float:
    """Returns how far apart two sizes are, as a ratio of 1 or more."""
    return max(one, other) / min(one, other)
