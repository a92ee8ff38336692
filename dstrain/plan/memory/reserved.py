"""From live bytes to what the caching allocator reserves and nvidia-smi shows.

Lists what a run allocates and frees in its first steps, with streams (`deepspeed.allocations`), and feeds it to
`caching_allocator`. `outside` has what lies outside of PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import tee

from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Allocator, Event
from dstrain.plan.memory.deepspeed import allocations
from dstrain.plan.memory.deepspeed.settings import micro_batches_played
from dstrain.plan.memory.fragmentation import most_of_streams, quick_ratio
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.optimizer_states import are_early
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.peak import Detail, Peak
from dstrain.units import MIB

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
    """The most in the last step replayed: what a look at nvidia-smi now and then finds, context and NCCL aside. Less
    than the other where memory ran out once and everything cached went back to the driver."""
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

    Where it would hold more than `most_bytes`, the replay ends as one that runs out of memory.
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
    """Returns what an allocator holds through the first steps, or STEPS_AFTER_RETRY of them once everything cached went
    back to the driver; `is_enough` says whether memory sufficed before them."""
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
    """Yields the events before the first step, then those of each step; a copy of it begins where it is."""
    return tee(allocations.steps(model, configuration, num_ranks, workspace_bytes), 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the allocator holds."""

    least: int
    """As little as it can in any step, as long as there is memory that it has not taken."""
    most: int
    """The peak of reserved bytes."""
    settled: int
    """That of the steps after the first."""
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

    What is not expected to run out of memory is replayed as far as it holds no more than may be used. If that is not
    enough to know, it is replayed to the end and, if it runs out of memory, again without a limit: the need.
    """
    model, cluster = workload.model, workload.cluster
    workspace, outside = workspace_bytes(cluster.gpu), outside_bytes(cluster, configuration, workload.measured)
    live, capacity = peak.total + 2 * workspace, cluster.gpu.memory_bytes - outside
    usable = usable_bytes - outside if usable_bytes else capacity
    least = max(live, min(live + peak.apart, capacity))
    most = round(quick_ratio(model, configuration, ranks, peak) * live)
    if detail < Detail.USABLE or not has_layer_code(model) or not configuration.model.is_deepspeed:
        return Held(least=least, most=most, settled=most)
    streams = most_of_streams(model, configuration, peak) + 2 * workspace
    if detail is Detail.USABLE and streams <= usable:
        return Held(least=least, most=round(streams), settled=round(streams))
    limits: list[tuple[int | None, int | None]] = [(capacity, usable)] if most <= capacity else []
    if detail is Detail.REPLAYED or not limits:
        limits += [(capacity, None), (None, None)]
    replay = _within(limits, model, configuration, ranks, workspace)
    if replay.out_of_memory:
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
