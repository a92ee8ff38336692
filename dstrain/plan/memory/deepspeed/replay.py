"""Replays the program of a micro-batch on each rank, for the engine's bytes at every moment of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dstrain.plan.memory.deepspeed.byte_account import ByteAccount, Parts
from dstrain.plan.memory.deepspeed.gradient_buckets import Reducer, Reduces, ShardedReducer, WideReducer
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.program import Event, Program
from dstrain.plan.memory.deepspeed.resident import accumulation_item, communication_item, is_wide
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.zero3_gathering import Coordinator, Gathers
from dstrain.plan.memory.deepspeed.zero12_partitions import PartitionedReducer, layout
from dstrain.plan.memory.zero import num_buckets


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The engine's bytes, by part, from one mark to the next."""

    high: Parts
    """The most while the engine acts at the mark."""
    after: Parts
    """What lives from then on."""
    high_total: int
    """All parts of `high` together."""
    after_total: int
    """All parts of `after` together."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One step of one rank."""

    rank: int
    micro_steps: tuple[tuple[Level, ...], ...]
    """A level for each mark of the program and, last, for the time after the backward pass; for each micro-batch."""
    kept: int
    """Bytes of gradient that are left for the step."""


def replays(program: Program, settings: Settings, ranks: int) -> tuple[Replay, ...]:
    """Returns the replays of the ranks that may hold most: the first, the last, and that with the most gradient."""
    candidates = {0}
    if settings.zero.stage in (1, 2) and not is_wide(settings):
        held = layout(program.modules, ranks).held_elements(ranks)
        candidates |= {ranks - 1, held.index(max(held))}
    return tuple(_replay(program, settings, ranks, rank) for rank in sorted(candidates))


def _replay(program: Program, settings: Settings, ranks: int, rank: int) -> Replay:
    account = ByteAccount()
    reducer = reducer_of(program.modules, settings, ranks, rank, account)
    coordinator = None
    if settings.zero.stage == 3:
        coordinator = Coordinator(program, gathers_of(settings, ranks), account)
    levels = []
    for micro in range(reducer.how.micro_steps):
        if coordinator and micro:
            coordinator.reset()
        levels.append(_micro_step(program, account, reducer, coordinator))
    return Replay(rank, tuple(levels), account.parts[0])


def _micro_step(
    program: Program, account: ByteAccount, reducer: Reducer, coordinator: Coordinator | None
) -> tuple[Level, ...]:
    levels: list[Level] = []
    quiet = _quiet(_level(account))
    actions = actions_of(reducer, coordinator)
    for event, number in program.events if coordinator else program.gradients:
        action = actions[event]
        if action is not None:
            action(number)
        elif account.is_touched:
            levels.append(_level(account))
            quiet = _quiet(levels[-1])
        else:
            levels.append(quiet)
    reducer.end()
    if coordinator:
        coordinator.leave()
    levels.append(_level(account))
    return tuple(levels)


def actions_of(reducer: Reducer, coordinator: Coordinator | None) -> list[Callable[[int], None] | None]:
    """Returns what to do at each event; nothing at a mark."""
    actions: list[Callable[[int], None] | None] = [None] * len(Event)
    actions[Event.GRAD] = reducer.grad
    if coordinator:
        actions[Event.FETCH] = actions[Event.FETCH_BACK] = coordinator.fetch
        actions[Event.RELEASE] = actions[Event.RELEASE_BACK] = coordinator.release
        actions[Event.KEEP], actions[Event.DROP] = coordinator.keep, coordinator.drop
    return actions


def _level(account: ByteAccount) -> Level:
    high, after = account.cut()
    return Level(high, after, sum(high), sum(after))


def _quiet(level: Level) -> Level:
    """Returns the level at a mark where the engine has nothing to do."""
    return Level(level.after, level.after, level.after_total, level.after_total)


def reducer_of(modules: Modules, settings: Settings, ranks: int, rank: int, account: ByteAccount) -> Reducer:
    how = Reduces(
        stage=settings.zero.stage,
        item=settings.model.item,
        communicated=communication_item(settings),
        accumulated=accumulation_item(settings),
        ranks=ranks,
        bucket=settings.zero.reduce_bucket_size,
        buckets=num_buckets(settings.zero),
        overlaps=settings.zero.overlap_comm,
        is_offloaded=settings.zero.is_offloaded,
        micro_steps=settings.step.grad_accum,
    )
    if settings.zero.stage == 3:
        return ShardedReducer(modules, how, account)
    if is_wide(settings):
        return WideReducer(modules, how, account, tuple(size * ranks for size in layout(modules, ranks).partitions))
    if settings.zero.stage == 0:
        return Reducer(modules, how, account)
    return PartitionedReducer(modules, how, account, rank)


def gathers_of(settings: Settings, ranks: int) -> Gathers:
    return Gathers(
        item=settings.model.item,
        ranks=ranks,
        prefetch=settings.zero.prefetch_bucket_size,
        max_live=settings.zero.max_live_parameters,
        reuse=settings.zero.max_reuse_distance,
        persistence=settings.zero.param_persistence_threshold,
        is_offloaded=settings.zero.offloads_params,
        hpz=settings.zero.hpz,
    )
