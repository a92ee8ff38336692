"""From live bytes to what the caching allocator reserves and nvidia-smi shows.

Lists what a run allocates and frees in its first steps, with streams (`deepspeed.allocations`), and feeds it to
`caching_allocator`. `outside` has what lies outside of PyTorch's allocator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import tee

from dstrain.choices import LossKernel
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration, Parallel
from dstrain.plan.memory.caching_allocator import Allocator, Event
from dstrain.plan.memory.deepspeed import allocations
from dstrain.plan.memory.deepspeed.settings import micro_batches_played
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.optimizer_states import are_early
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.params import shard, trained_on_rank
from dstrain.plan.memory.peak import Detail, Peak
from dstrain.plan.memory.zero import gathered_bytes
from dstrain.units import MIB

FULL_LOGITS = 1.2
"""Copies of the logits in the training precision that lie in holes beside the loss's copies, in full training: the
first ones are freed before a larger tensor is asked for. Source, here and below: the upper edge of `reserved` over
500 configurations of seven models drawn at random; tests/plan/memory/test_fragmentation.py compares another draw."""
ADAPTER_LOGITS = 2.0
"""The same if the base is frozen, except under ZeRO-3."""
FIXED_LOGITS = 2.5
"""The same if segments cannot grow."""
GATHERED_UNITS = 2.7
"""ZeRO-3: units that were given back, or gathered ahead, while computation has yet to get past others; a unit is the
embedding, or a block of experts where that is larger."""
EXPERT_UNITS = 0.3
"""The same of mixtures beyond what streams hold at their own peaks; a unit is the experts of a layer on this rank.
Source, with the two below: the upper edge of `reserved` over 180 configurations of five mixtures drawn at random."""
EXPERT_HOLES = {True: 0.17, False: 0.03}
"""Share of the activations of mixtures in other holes, with and without recomputation."""
STREAM_HOLES = 0.04
"""Share of all that their streams hold in others."""
HOLES = {
    "full": 0.05,
    "adapter": 0.02,
    "resting": 0.12,
    "sharded": 0.03,
}
"""Share of live bytes in other holes by what is trained; `resting`: gradients lie between
saved tensors, because several micro-batches add to them or nothing is recomputed."""
FIXED_HOLES = 0.10
"""Additional share if segments cannot grow."""


def quick_ratio(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns reserved over live bytes at most, with `peak` the live peak of one rank of `num_ranks`.

    In draws of configurations the replay is more than 2 % above it in 9 of 250, and 2 of 100 if segments cannot
    grow; it is on average 6 % and 18 % above the replay.
    """
    item = configuration.model.item
    kind = kind_of(configuration)
    base = float(peak.total)
    # streams share no free blocks: what theirs hold comes on top
    if kind == "sharded":
        base += _streams(model, configuration, peak)
    elif configuration.zero.overlap_comm:
        base += _bucket(model, configuration)
    share, logits = HOLES[kind], FULL_LOGITS
    if not configuration.model.is_full and kind != "sharded":
        logits = ADAPTER_LOGITS
    if not configuration.expandable_segments:
        share, logits = share + FIXED_HOLES, FIXED_LOGITS
    reserved = base * (1 + share)
    if configuration.kernels.loss is LossKernel.FULL:
        reserved += logits * item * model.vocab_size * configuration.batch.tokens / configuration.parallel.sp
    if kind != "sharded":
        reserved += 0.5 * item * model.vocab_size * model.hidden_size
        reserved += _step_copies(model, configuration, num_ranks, peak)
    return reserved / peak.total


def most_of_streams(model: ModelFacts, configuration: Configuration, peak: Peak) -> float:
    """Returns an upper bound of the memory that streams reserve for a mixture under ZeRO-3; infinite if unknown.

    Tighter than `quick_ratio`, which knows no streams: 10 % above the replay on average, and more than 2 % below it in
    one of 183 draws, with 2 GiB live.
    """
    is_fused = configuration.kernels.loss is not LossKernel.FULL
    if model.moe is None or not peak.apart or not configuration.expandable_segments or not is_fused:
        return math.inf
    experts = _experts(shard(model, Parallel(ep=configuration.parallel.ep))) / model.moe.num_moe_layers
    whole = configuration.model.item * (EXPERT_UNITS * experts + configuration.zero.max_reuse_distance)
    holes = EXPERT_HOLES[configuration.checkpointing.enabled] * peak.activations
    return (1 + STREAM_HOLES) * (peak.total + peak.apart) + whole + holes


def kind_of(configuration: Configuration) -> str:
    """Returns the key of `HOLES` for a configuration."""
    if configuration.zero.stage == 3:
        return "sharded"
    if not configuration.model.is_full:
        return "adapter"
    return "resting" if configuration.step.grad_accum > 1 or not configuration.checkpointing.enabled else "full"


def _step_copies(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns the copies of a partition's gradient that fit in no hole under ZeRO-1 and 2: half of the 2 + 4 bytes."""
    if configuration.zero.stage not in (1, 2) or configuration.zero.is_offloaded or not configuration.model.is_full:
        return 0.0
    return 3 * model.num_params / num_ranks if peak.name == "optimizer step" else 0.0


def _streams(model: ModelFacts, configuration: Configuration, peak: Peak) -> float:
    """Returns the bytes of ZeRO-3's gather and reduce streams beyond those live at the peak."""
    item = configuration.model.item
    unit = max(group.numel for group in model.tensors if group.kind is not Kind.VISION)
    if model.moe is not None:
        unit = max(unit, _experts(model) // model.moe.num_moe_layers)
    counts = trained_on_rank(model, configuration)
    most = gathered_bytes(counts, configuration, unit)
    whole = GATHERED_UNITS * item * min(unit, model.num_params / 3)
    return max(0, most - peak.gathered) + whole + _bucket(model, configuration)


def _bucket(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the copy of a bucket of gradients that is reduced in its own stream."""
    counts = trained_on_rank(model, configuration)
    return configuration.model.item * min(configuration.zero.reduce_bucket_size, counts.trainable)


def _experts(model: ModelFacts) -> int:
    return sum(group.numel * group.count for group in model.tensors if group.kind in (Kind.EXPERT, Kind.ROUTER))


STEPS_REPLAYED = 2
"""Replayed steps: the second works around what the first has left: optimizer states, workspaces. Under ZeRO-3 with
states that were there before, it changes 0.0-0.4 % in a grid of replays, and is left out."""
STEPS_AFTER_RETRY = 4
"""The same if memory ran out: all cached segments were returned, and blocks get new places."""
EVENTS_KEPT = 2
"""Configurations whose events are kept: one is replayed with several limits, one after the other."""
AMPERE_WORKSPACE_BYTES = round(8.125 * MIB)
HOPPER_WORKSPACE_BYTES = 32 * MIB
"""cuBLAS workspace of one thread, of which two compute: forward and autograd. Source: torch 2.13
aten/src/ATen/cuda/CublasHandlePool.cpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Memory that the allocator takes from the driver, up to the end of the replay or the allocation that failed."""

    reserved_bytes: int
    """The peak at any time: torch's max_memory_reserved."""
    settled_bytes: int
    """The peak of the last step replayed, as nvidia-smi shows it now and then, context and NCCL aside. Less than the
    other if memory ran out once and everything cached went back to the driver."""
    retries: int
    """How often all cached segments were returned to the driver: torch's num_alloc_retries."""
    settled_retries: int
    """The same in the last step replayed, as in each that follows."""
    out_of_memory: bool
    """Whether an allocation failed nevertheless."""


def workspace_bytes(gpu: Gpu) -> int:
    """Returns the cuBLAS workspace of one thread."""
    return HOPPER_WORKSPACE_BYTES if gpu.compute_capability >= (9, 0) else AMPERE_WORKSPACE_BYTES


def reserved(
    model: ModelFacts,
    configuration: Configuration,
    num_ranks: int,
    *,
    capacity_bytes: int | None,
    expandable_segments: bool,
    workspace_bytes: int = AMPERE_WORKSPACE_BYTES,
    most_bytes: int | None = None,
) -> Reserved:
    """Returns the memory of the caching allocator on one rank of `num_ranks`, whose GPU leaves it `capacity_bytes`.

    If it would hold more than `most_bytes`, the replay ends as one that runs out of memory.
    Fourteen runs on one H200 are met to -1.6 to +4.9 % (docs/accuracy.md). The model's layer code has to be on the
    tape.
    """
    shared = replace(
        configuration,
        step=replace(configuration.step, grad_accum=micro_batches_played(configuration)),
        zero=replace(configuration.zero, pin_memory=True),
    )
    return _reserved(model, shared, num_ranks, capacity_bytes, most_bytes, expandable_segments, workspace_bytes)


@lru_cache(256)
def _reserved(
    model: ModelFacts,
    configuration: Configuration,
    num_ranks: int,
    capacity_bytes: int | None,
    most_bytes: int | None,
    expandable_segments: bool,
    workspace_bytes: int,
) -> Reserved:
    """Replays what differs only in choices that the GPU does not see once: all the micro-batches of a step but two, and
    whether host memory is page-locked."""
    new = partial(
        Allocator, expandable_segments=expandable_segments, capacity_bytes=capacity_bytes, most_bytes=most_bytes
    )
    steps = copy(_steps(model, configuration, num_ranks, workspace_bytes))
    allocator, is_enough = _begun(new, next(steps))
    is_brief = configuration.zero.stage == 3 and are_early(configuration)
    return replayed(allocator, steps, is_enough=is_enough, num_steps=1 if is_brief else STEPS_REPLAYED)


def replayed(
    allocator: Allocator, steps: Iterator[list[Event]], *, is_enough: bool, num_steps: int = STEPS_REPLAYED
) -> Reserved:
    """Returns the memory of an allocator through the first steps: STEPS_AFTER_RETRY once everything cached went back to
    the driver; `is_enough` says whether memory sufficed before them."""
    highest = settled = allocator.driver.peak_bytes
    before = 0
    for index in range(STEPS_AFTER_RETRY if is_enough else 0):
        if index >= num_steps and not allocator.retries:
            break
        allocator.driver.forget_peak()
        before = allocator.retries
        is_enough = allocator.feed(next(steps))
        settled = allocator.driver.peak_bytes
        highest = max(highest, settled)
        if not is_enough:
            break
    return Reserved(
        reserved_bytes=highest,
        settled_bytes=settled,
        retries=allocator.retries,
        settled_retries=allocator.retries - before,
        out_of_memory=not is_enough,
    )


def _begun(new: Callable[[], Allocator], events: list[Event]) -> tuple[Allocator, bool]:
    """Returns the allocator before the first step, and whether memory sufficed.

    DeepSpeed flattens parameters in RAM where the GPU has no room for both copies. `dstrain run` gives free memory back
    after the checks before the first step.
    """
    allocator = new()
    is_enough = allocator.feed(events)
    if not is_enough:
        allocator = new()
        is_enough = allocator.feed(event for event in events if event[0] != allocations.LOADED)
    allocator.empty_cache()
    allocator.driver.forget_peak()
    return allocator, is_enough


@lru_cache(EVENTS_KEPT)
def _steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int
) -> Iterator[list[Event]]:
    """Yields the events before the first step, then each step's; a copy of the iterator continues from its position."""
    return tee(allocations.steps(model, configuration, num_ranks, workspace_bytes), 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that the allocator holds."""

    least: int
    """As little as it can in any step, as long as there is memory that it has not taken."""
    most: int
    """The peak of reserved bytes."""
    settled: int
    """The peak of the steps after the first."""
    retries_per_step: int = 0
    """How often it gives everything back in each of these."""


def held_by_allocator(
    workload: Workload,
    configuration: Configuration,
    ranks: int,
    peak: Peak,
    *,
    detail: Detail,
    usable_bytes: int,
) -> Held:
    """Returns the memory of the allocator: replayed, or an upper estimate.

    A configuration that is not expected to run out of memory is replayed until it holds more than may be used. If that
    does not decide, it is replayed to the end and, if it runs out of memory, again without a limit: the need.
    """
    model, cluster = workload.model, workload.cluster
    workspace, outside = workspace_bytes(cluster.gpu), outside_bytes(cluster, configuration, workload.measured)
    live, capacity = peak.total + 2 * workspace, cluster.gpu.memory_bytes - outside
    usable = usable_bytes - outside if usable_bytes else capacity
    least = max(live, min(live + peak.apart, capacity))
    most = round(quick_ratio(model, configuration, ranks, peak) * live)
    if detail < Detail.USABLE or not has_layer_code(model):
        return Held(least=least, most=most, settled=most)
    streams = most_of_streams(model, configuration, peak) + 2 * workspace
    if detail is Detail.USABLE and streams <= usable:
        return Held(least=least, most=round(streams), settled=round(streams))
    limits: list[tuple[int | None, int | None]] = [(capacity, usable)] if most <= capacity else []
    if detail is Detail.REPLAYED or not limits:
        limits += [(capacity, None), (None, None)]
    replay = _within(limits, model, configuration, ranks, workspace)
    if replay.out_of_memory:
        # a replay with a limit tells only that it is too much, not how much it would take
        return Held(least=least, most=usable + 1, settled=usable + 1)
    retries = replay.settled_retries * configuration.step.grad_accum // micro_batches_played(configuration)
    return Held(
        least=least,
        most=max(live, replay.reserved_bytes),
        settled=max(live, replay.settled_bytes),
        retries_per_step=retries,
    )


def _within(
    limits: list[tuple[int | None, int | None]],
    model: ModelFacts,
    configuration: Configuration,
    ranks: int,
    workspace: int,
) -> Reserved:
    """Returns the replay of the first pair of memory and most bytes that is enough, or of the last."""
    for capacity, most in limits:
        replay = reserved(
            model,
            configuration,
            ranks,
            capacity_bytes=capacity,
            expandable_segments=configuration.expandable_segments,
            workspace_bytes=workspace,
            most_bytes=most,
        )
        if not replay.out_of_memory:
            break
    return replay
