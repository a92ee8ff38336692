"""Alternatives to a choice that differ in one thing: their cost or gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

from dstrain.choices import Attention, Offload, Optimizer
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration, changes
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate, Speed, Topic
from dstrain.plan.labels import CHOICE_WORDS
from dstrain.plan.request import SPEED, Request
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import EQUAL_RATIO, Ranking, by_time, search
from dstrain.plan.search.search_space import (
    TIGHT,
    global_batch,
    sized,
    strategy_key,
)
from dstrain.plan.speed.step_time import speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """An alternative that differs in one choice."""

    chosen: str
    """The choice as it is: `ZeRO-3`."""
    other: str
    """The choice as it could be: `ZeRO-2`."""
    topic: Topic
    """The choice that differs."""
    estimate: Estimate
    """The estimate of the same plan with the other choice."""
    best: Estimate | None
    """The fastest plan with the other choice, whatever else it has; None if none fits."""

    @property
    def is_only_difference(self) -> bool:
        """Whether the fastest plan with the other choice differs in nothing else."""
        return self.best is not None and _kind(self.best.configuration) == _kind(self.estimate.configuration)


def _kind(c: Configuration) -> tuple[object, ...]:
    return *strategy_key(c), c.zero.offload_ratio, c.checkpointing.every_n_layers, c.batch.micro_batch


def neighbours(
    workload: Workload,
    request: Request,
    chosen: Estimate,
    *,
    ranking: Ranking,
    assess: Callable[[Configuration], Estimate],
    verify: Callable[[Configuration], Estimate],
) -> list[Neighbour]:
    """Returns the alternatives to each choice that the request leaves open, if the rules allow them: the same plan with
    the other choice, with small buffers if needed, and the fastest plan of the search that has it.

    One that seems to fit and to be faster is estimated exactly: the search has passed it over.
    """
    alternatives = []
    for topic, configuration in compared(chosen.configuration):
        if getattr(request, topic) is not None or broken(workload, configuration):
            continue
        estimate = assess(configuration)
        if not estimate.fits:
            # a choice is not refused for buffers that could be smaller
            estimate = assess(sized(workload.model, configuration, TIGHT))
        if estimate.fits and (gain_ratio(workload.cluster, estimate, chosen) or 0) > EQUAL_RATIO:
            estimate = verify(estimate.configuration)
        # the search may know a faster plan with this choice, one that differs in other choices as well
        best = _fastest_with(topic, configuration, ranking)
        if estimate.fits and (best is None or (gain_ratio(workload.cluster, estimate, best) or 0) > 0):
            best = estimate
        mine, other = (CHOICE_WORDS[topic](one) for one in (chosen.configuration, configuration))
        alternatives.append(Neighbour(chosen=mine, other=other, topic=topic, estimate=estimate, best=best))
    return alternatives


def _fastest_with(topic: Topic, other: Configuration, ranking: Ranking) -> Estimate | None:
    """Returns the fastest plan of a search that makes one choice as another configuration does, and seems to fit."""
    words, evaluator = CHOICE_WORDS[topic], ranking.evaluator
    if topic is Topic.MICRO_BATCH:
        with_it = [one for one in ranking.candidates if one.micro_batch == other.batch.micro_batch]
    else:
        wanted = words(other)
        with_it = [one for one in ranking.candidates if words(one.way) == wanted]
    # a quick estimate is taken as it is, with all that the allocator may hold: only what is replayed differs
    seeming = (
        each for each in by_time(evaluator, with_it) if evaluator.seems_to_fit(each) and evaluator.estimate(each).fits
    )
    first = next((each for each in seeming if evaluator.fits(each)), None)
    return None if first is None else evaluator.estimate(first)


def compared(chosen: Configuration) -> Iterator[tuple[Topic, Configuration]]:
    """Yields every configuration that differs in a choice that plans compare, with that choice."""
    size = chosen.batch.micro_batch
    values = {Topic.MICRO_BATCH: (2 * size, size // 2) if size % 2 == 0 else (2 * size,), Topic.HPZ: (1,)}
    for topic in (Topic.ZERO_STAGE, Topic.OFFLOAD, Topic.GRAD_CKPT, Topic.MICRO_BATCH, Topic.HPZ):
        for other in changes(chosen, topic, values.get(topic)):
            if CHOICE_WORDS[topic](other) != CHOICE_WORDS[topic](chosen):
                yield topic, other


def unasked(request: Request, samples: int | None) -> Request | None:
    """Returns the request with everything open that is a matter of speed, so that dstrain chooses it, with `samples` a
    step; None if nothing of that is given."""
    is_split = request.micro_batch is not None or request.grad_accum is not None
    never_chosen: dict[str, Any] = {"qwz": False, "tp": 1}
    if request.attn is not Attention.EAGER:  # as fast as what every machine has, or faster
        never_chosen["attn"] = request.attn
    never_chosen["global_batch"] = samples if is_split else request.global_batch
    opened = replace(request, **{**dict.fromkeys(SPEED), **never_chosen})
    return None if opened == request else opened


def eight_bit_instead(workload: Workload, request: Request, chosen: Estimate) -> Estimate | None:
    """Returns the best plan with 8-bit AdamW and no offload, if it fits and is faster than one that offloads AdamW.

    It is proposed and never chosen: it rounds the moments, which changes the numerics of training.
    """
    if not chosen.fits or not chosen.configuration.zero.is_offloaded or request.optimizer is not Optimizer.ADAMW:
        return None
    asked = replace(
        request,
        optimizer=Optimizer.ADAMW_8BIT,
        offload=Offload.NONE,
        activation_offload=False,
        sp=chosen.configuration.parallel.sp,
        tp=chosen.configuration.parallel.tp,
        ep=chosen.configuration.parallel.ep,
    )
    try:
        ranking = search(workload, asked, top=1)
    except InvalidConfig:  # without offload the request contradicts itself
        return None
    gain = gain_ratio(workload.cluster, ranking.plans[0], chosen) if ranking.fits else None
    return ranking.plans[0] if gain is not None and gain > EQUAL_RATIO else None


def liger_gain_ratio(workload: Workload, request: Request, chosen: Estimate) -> float | None:
    """Returns how much faster a plan would be on Liger's kernels, which need no more memory, as a ratio.

    None if it has them or cannot have them, if speed is unknown, and on GPUs without bf16 tensor cores.
    """
    kernels = replace(chosen.configuration.kernels, liger=True)
    other = replace(chosen.configuration, kernels=kernels)
    is_new = workload.cluster.gpu.compute_capability >= (8, 0)
    if request.liger or not is_new or broken(workload, other):
        return None
    now, then = speed(workload, chosen.configuration), speed(workload, other)
    return None if now is None or then is None else now.step_s / then.step_s - 1


def faster_but_too_large(cluster: Cluster, chosen: Estimate, others: list[Neighbour]) -> tuple[Neighbour, ...]:
    """Returns the neighbours that would be faster and do not fit, the nearest to fitting first.

    Those that lack as much memory as there is are left out. If speed is unknown, those that leave more on the GPU count
    as faster.
    """
    too_large = [
        neighbour
        for neighbour in others
        if not neighbour.estimate.fits
        and _would_be_faster(cluster, chosen, neighbour)
        and missing_bytes(neighbour.estimate) < _present_bytes(neighbour.estimate)
    ]
    return tuple(sorted(too_large, key=lambda neighbour: missing_bytes(neighbour.estimate)))


def _would_be_faster(cluster: Cluster, chosen: Estimate, other: Neighbour) -> bool:
    gain = gain_ratio(cluster, other.estimate, chosen)
    more_bytes = other.estimate.memory.device_bytes_per_gpu - chosen.memory.device_bytes_per_gpu
    return more_bytes > 0 if gain is None else gain > EQUAL_RATIO


def gain_ratio(cluster: Cluster, one: Estimate, other: Estimate) -> float | None:
    """Returns how much faster `one` is than `other` for each sample, as a ratio, or None if speed is unknown."""
    if one.speed is None or other.speed is None:
        return None
    return _sample_s(cluster, other, other.speed) / _sample_s(cluster, one, one.speed) - 1


def _sample_s(cluster: Cluster, estimate: Estimate, speed: Speed) -> float:
    return speed.step_s / global_batch(cluster, estimate.configuration)


def missing_bytes(estimate: Estimate) -> int:
    """Returns the bytes that an estimate lacks, on the GPU or, where that fits, in host RAM."""
    if not estimate.fits_gpu:
        return estimate.memory.needed_bytes_per_gpu - estimate.usable_bytes_per_gpu
    return estimate.memory.host_bytes_per_node - estimate.usable_bytes_per_host


def _present_bytes(estimate: Estimate) -> int:
    """Returns the usable share of the memory that an estimate lacks."""
    return estimate.usable_bytes_per_host if estimate.fits_gpu else estimate.usable_bytes_per_gpu


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
            by_kind.setdefault(_kind_with_batch(estimate.configuration), estimate)
    return tuple(by_kind.values())[:count]


def with_fastest_batch(workload: Workload, estimate: Estimate, measured: Sequence[tuple[Estimate, float]]) -> Estimate:
    """Returns a configuration with the micro-batch of the fastest one that was measured, each with its seconds.

    If it beat another micro-batch of its strategy, that is taken to hold for other strategies too. The global batch
    stays; if that cannot be, or does not fit, the configuration stays.
    """
    if not measured:
        return estimate
    chosen, best = estimate.configuration, min(measured, key=lambda pair: pair[1])[0].configuration
    sizes = {
        one.configuration.batch.micro_batch
        for one, _ in measured
        if strategy_key(one.configuration) == strategy_key(best)
    }
    other = next(changes(chosen, "micro_batch", (best.batch.micro_batch,)), None)
    if len(sizes) < 2 or strategy_key(chosen) == strategy_key(best) or other is None or broken(workload, other):
        return estimate
    assessed = assess(workload, other)
    return assessed if assessed.fits else estimate


def _kind_with_batch(c: Configuration) -> tuple[object, ...]:
    """Returns the identity of a configuration without the sizes of its buffers."""
    batch = c.batch.micro_batch, c.step.grad_accum
    return *strategy_key(c), c.kernels.torch_compile, c.checkpointing.every_n_layers, *batch


def _other_batches(workload: Workload, request: Request, best: Estimate) -> Iterator[Estimate]:
    """Yields a plan with other micro-batches and the same global batch, the nearest first, as far as they fit."""
    if request.micro_batch is not None:
        return
    size, others = best.configuration.batch.micro_batch, changes(best.configuration, "micro_batch")
    for other in sorted(others, key=lambda one: _distance(one.batch.micro_batch, size)):
        if not broken(workload, other):
            estimate = assess(workload, other)
            if estimate.fits:
                yield estimate


def _distance(one: int, other: int) -> float:
    """Returns how far apart two sizes are, as a ratio of 1 or more."""
    return max(one, other) / min(one, other)
