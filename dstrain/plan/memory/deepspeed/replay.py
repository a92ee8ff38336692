"""Replays the program of a micro-batch on each rank: the engine's allocations and frees at every mark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from dstrain.plan.memory.deepspeed.byte_account import Action, ByteAccount, Part
from dstrain.plan.memory.deepspeed.gradient_buckets import Reducer, Reduces, ShardedReducer, WideReducer
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.program import Event, Program
from dstrain.plan.memory.deepspeed.resident import accumulation_item, communication_item, is_wide
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.zero3_gathering import Coordinator, Gathers
from dstrain.plan.memory.deepspeed.zero12_partitions import PartitionedReducer, layout
from dstrain.plan.memory.layers.recording import END
from dstrain.plan.memory.optimizer_states import master_item
from dstrain.plan.memory.zero import num_buckets


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The engine's bytes on one rank in the forward and backward passes of a step."""

    rank: int
    micro_batches: tuple[tuple[Action, ...], ...]
    """Actions at the marks of each micro-batch, without quiet ones; the last is the end."""
    kept: int
    """Bytes of gradient that remain for the step."""


def replays(program: Program, settings: Settings, ranks: int) -> tuple[Replay, ...]:
    """Returns the replays of the ranks that may peak highest: first, last, and the one with the most gradient."""
    reduces = _reduces(settings, ranks)
    candidates = {0}
    if settings.zero.stage in (1, 2) and not reduces.is_wide:
        elements = layout(program.modules, ranks).elements_by_rank(ranks)
        candidates |= {ranks - 1, elements.index(max(elements))}
    gathers = _gathers(settings, ranks) if settings.zero.stage == 3 else None
    return tuple(_replay(program, reduces, gathers, rank) for rank in sorted(candidates))


@cache
def _replay(program: Program, reduces: Reduces, gathers: Gathers | None, rank: int) -> Replay:
    """Replays one rank; settings that differ in neither `reduces` nor `gathers` share it."""
    account = ByteAccount()
    reducer = _reducer(program.modules, reduces, rank, account)
    coordinator = Coordinator(program, gathers, account) if gathers else None
    micro_batches = []
    for micro in range(reducer.how.micro_steps):
        if coordinator and micro:
            coordinator.reset()
        micro_batches.append(tuple(_micro_batch(program, account, reducer, coordinator)))
    return Replay(rank, tuple(micro_batches), account.parts[Part.GRADS])


def _micro_batch(
    program: Program, account: ByteAccount, reducer: Reducer, coordinator: Coordinator | None
) -> Iterator[Action]:
    calls = _calls(reducer, coordinator)
    for event, number in program.events if coordinator else program.gradients:
        call = calls[event]
        if call is not None:
            call(number)
        elif account.events:
            yield account.cut(program.marks[number])
    reducer.end()
    if coordinator:
        coordinator.leave()
    yield account.cut(END)


def _calls(reducer: Reducer, coordinator: Coordinator | None) -> list[Callable[[int], None] | None]:
    """Returns the action of each event; none at a mark."""
    calls: list[Callable[[int], None] | None] = [None] * len(Event)
    calls[Event.GRAD] = reducer.grad
    if coordinator:
        calls[Event.FETCH] = calls[Event.FETCH_BACK] = coordinator.fetch
        calls[Event.RELEASE] = calls[Event.RELEASE_BACK] = coordinator.release
        calls[Event.KEEP], calls[Event.DROP] = coordinator.keep, coordinator.drop
    return calls


def _reducer(modules: Modules, how: Reduces, rank: int, account: ByteAccount) -> Reducer:
    if how.stage == 3:
        return ShardedReducer(modules, how, account)
    if how.is_wide:
        return WideReducer(modules, how, account, layout(modules, how.ranks).whole)
    if how.stage == 0:
        return Reducer(modules, how, account)
    return PartitionedReducer(modules, how, account, rank)


def _reduces(settings: Settings, ranks: int) -> Reduces:
    return Reduces(
        stage=settings.zero.stage,
        item=settings.model.item,
        communicated=communication_item(settings),
        accumulated=accumulation_item(settings),
        stepped=master_item(settings.step.optimizer),
        ranks=ranks,
        bucket=settings.zero.reduce_bucket_size,
        buckets=num_buckets(settings.zero),
        overlaps=settings.zero.overlap_comm,
        is_offloaded=settings.zero.is_offloaded,
        is_wide=is_wide(settings),
        micro_steps=settings.step.grad_accum,
    )


def _gathers(settings: Settings, ranks: int) -> Gathers:
    return Gathers(
        item=settings.model.item,
        ranks=ranks,
        prefetch=settings.zero.prefetch_bucket_size,
        max_live=settings.zero.max_live_parameters,
        reuse=settings.zero.max_reuse_distance,
        persistence=settings.zero.param_persistence_threshold,
        is_offloaded=settings.zero.offloads_params and ranks <= settings.parallel.ep,
        hpz=settings.zero.hpz,
        qwz=settings.zero.qwz,
    )
