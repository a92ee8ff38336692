"""Bytes that the optimizer step adds: norms, flat and master-dtype copies of gradients, temporaries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from dstrain.choices import Optimizer, Precision
from dstrain.plan.memory.deepspeed.byte_account import rounded
from dstrain.plan.memory.deepspeed.gradient_buckets import NORM_ITEM
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.resident import (
    accumulation_item,
    is_wide,
    matrices,
    num_staying,
    state_sizes,
    sub_groups,
)
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.zero12_partitions import layout
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.optimizer_states import master_item


class StepInstant(NamedTuple):
    """Bytes of a rank beyond its resident states."""

    grads: int
    """Gradients."""
    buffers: tuple[int, ...]
    """Copies and temporaries, in the order in which they are allocated."""
    states: tuple[int, ...] = ()
    """Optimizer states that the first step allocates now."""


def step_instants(modules: Modules, settings: Settings, ranks: int, rank: int, kept: int) -> Iterator[StepInstant]:
    """Yields the instants of the step on one rank.

    `kept` is what the backward pass has left: the gradient partition of ZeRO-1 and 2, all gradients of ZeRO-0.
    """
    if settings.zero.stage == 0:
        yield from _whole(modules, settings, kept)
    elif settings.zero.stage == 3:
        yield from _sharded(modules, settings, ranks)
    elif not settings.zero.is_offloaded and not is_wide(settings):
        yield from _partitioned(modules, settings, ranks, rank, kept)
    else:
        partitions = () if settings.zero.is_offloaded else layout(modules, ranks).partitions
        states = chain.from_iterable(state_sizes(size, settings.step.optimizer) for size in partitions)
        yield StepInstant(kept, (), tuple(states))


def _whole(modules: Modules, settings: Settings, kept: int) -> Iterator[StepInstant]:
    """ZeRO-0: a norm in fp32, then fp32 gradients of everything beside the others.

    Source: deepspeed 0.19.8 runtime/fp16/unfused_optimizer.py: step.
    """
    numels = [weight.numel for weight in modules.weights if weight.trains]
    copies = 0 if settings.model.precision is Precision.FP32 else FP32
    wide = sum(rounded(copies * numel) for numel in numels)
    largest = max(numels, default=0)
    yield StepInstant(kept, (rounded(FP32 * largest),))
    yield StepInstant(kept, (wide,))


def _partitioned(modules: Modules, settings: Settings, ranks: int, rank: int, kept: int) -> Iterator[StepInstant]:
    """ZeRO-1 and 2: a norm in fp64 of one tensor at a time; group by group a flat copy, then one as the master copy.

    Muon's updates are beside the gradients. Source: runtime/zero/stage_1_and_2.py: get_grad_norm_direct,
    _get_flat_partition_unpadded, step.
    """
    flat_layout = layout(modules, ranks)
    item, wide, master = settings.model.item, accumulation_item(settings), master_item(settings.step.optimizer)
    slices = flat_layout.slices.items()
    mine = [numel for weight, parts in slices for at, numel in parts if flat_layout.is_of(rank, weight, at)]
    yield StepInstant(kept, (rounded(max(mine, default=0) * NORM_ITEM),))
    if settings.step.optimizer is Optimizer.MUON:
        updated = matrices(modules) // ranks
        beside = rounded(item * updated)
        for size in (updated, sum(flat_layout.partitions) - updated):
            copied = rounded(master * size) if wide != master else 0
            yield from _stepping(settings, size, kept + beside, rounded(item * size), copied)
        return
    for group, size in zip(modules.groups(), flat_layout.partitions, strict=True):
        tensors = sum(flat_layout.is_of(rank, weight, at) for weight in group for at, _ in flat_layout.slices[weight])
        flat = rounded(item * size) if tensors > 1 and wide == item else 0
        copied = rounded(master * size) if wide != master else 0
        yield from _stepping(settings, size, kept, flat, copied)


def _stepping(settings: Settings, numel: int, kept: int, flat: int, copied: int) -> Iterator[StepInstant]:
    """Flat gradients become a copy in the master copy's dtype, or stay, while the optimizer works on a group."""
    yield StepInstant(kept, (flat, copied))
    yield StepInstant(kept, (copied or flat,), state_sizes(numel, settings.step.optimizer))


def _sharded(modules: Modules, settings: Settings, ranks: int) -> Iterator[StepInstant]:
    """ZeRO-3: the same for each sub-group.

    Source: runtime/zero/stage3.py: get_grad_norm_direct, _prepare_sub_group, backup_optimizer; torch 2.13
    optim/adamw.py: _multi_tensor_adamw.
    """
    groups = sub_groups(modules, ranks, settings.zero.sub_group_size)
    if settings.zero.is_offloaded:  # torch's foreach AdamW steps what stays, with a square root of its second moments
        for shares in groups[: num_staying(groups, settings.zero)]:
            numel, optimizer = sum(shares), settings.step.optimizer
            yield StepInstant(0, (rounded(master_item(optimizer) * numel),), state_sizes(numel, optimizer))
        return
    wide, master = accumulation_item(settings), master_item(settings.step.optimizer)
    yield StepInstant(0, (rounded(max((share for shares in groups for share in shares), default=0) * NORM_ITEM),))
    for shares in groups:
        size = sum(shares)
        flat = rounded(wide * size) if len(shares) > 1 else 0
        copied = rounded(master * size) if wide != master else 0
        yield from _stepping(settings, size, 0, flat, copied)
