"""What the optimizer step adds: norms, flat copies of gradients and those in the master copy's dtype, temporaries."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Optimizer, Precision
from dstrain.plan.memory.deepspeed.byte_account import rounded
from dstrain.plan.memory.deepspeed.gradient_buckets import NORM_ITEM
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.resident import FP32, accumulation_item, is_wide, sub_groups
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.zero12_partitions import layout
from dstrain.plan.memory.optimizer_states import master_item

TEMPORARIES: dict[Optimizer, int] = {
    Optimizer.ADAMW: 0,
    Optimizer.ADAMW_FUSED: 0,
    Optimizer.ADAMW_8BIT: 0,
    Optimizer.ADAMW_BF16: 0,
    Optimizer.ADAFACTOR: 8,
    Optimizer.LION: 0,
    Optimizer.SGD: 0,
    Optimizer.MUON: 0,
}
"""Bytes of an element that the optimizer has beside gradient and states while it works. AdamW is fused, bitsandbytes'
kernels work in place, SGD has no momentum; Adafactor has two fp32 tensors at a time. Source: transformers 5.23
trainer_optimizer.py; optimization.py: Adafactor.step."""


def step_bytes(modules: Modules, settings: Settings, ranks: int, rank: int, kept: int) -> Iterator[tuple[int, int]]:
    """Yields gradients and buffers, beyond what is resident, at the instants of the step on one rank.

    `kept` is what the backward pass has left: the gradient partition of ZeRO-1 and 2, all gradients of ZeRO-0.
    """
    if settings.zero.stage == 0:
        yield from _whole(modules, settings, kept)
    elif settings.zero.stage == 3:
        yield from _sharded(modules, settings, ranks)
    elif not settings.zero.is_offloaded and not is_wide(settings):
        yield from _partitioned(modules, settings, ranks, rank, kept)
    else:
        yield kept, 0


def _whole(modules: Modules, settings: Settings, kept: int) -> Iterator[tuple[int, int]]:
    """ZeRO-0: a norm in fp32, then fp32 gradients of everything beside the others.

    Source: deepspeed 0.19.8 runtime/fp16/unfused_optimizer.py: step.
    """
    numels = [weight.numel for weight in modules.weights if weight.trains]
    copies = 0 if settings.model.precision is Precision.FP32 else FP32
    wide = sum(rounded(copies * numel) for numel in numels)
    largest = max(numels, default=0)
    yield kept, rounded(FP32 * largest)
    yield kept, wide + rounded(TEMPORARIES[settings.step.optimizer] * largest)


def _partitioned(modules: Modules, settings: Settings, ranks: int, rank: int, kept: int) -> Iterator[tuple[int, int]]:
    """ZeRO-1 and 2: a norm in fp64 of one tensor at a time; group by group a flat copy, then one as the master copy.

    Source: runtime/zero/stage_1_and_2.py: get_grad_norm_direct, step.
    """
    flat_layout = layout(modules, ranks)
    item, wide, master = settings.model.item, accumulation_item(settings), master_item(settings.step.optimizer)
    slices = flat_layout.slices.items()
    mine = [numel for weight, parts in slices for at, numel in parts if flat_layout.is_of(rank, weight, at)]
    yield kept, rounded(max(mine, default=0) * NORM_ITEM)
    for group, size in zip(modules.groups(), flat_layout.partitions, strict=True):
        tensors = sum(flat_layout.is_of(rank, weight, at) for weight in group for at, _ in flat_layout.slices[weight])
        flat = rounded(item * size) if tensors > 1 and wide == item else 0
        copied = rounded(master * size) if wide != master else 0
        yield kept, flat + copied
        yield kept, (copied or flat) + rounded(TEMPORARIES[settings.step.optimizer] * size)


def _sharded(modules: Modules, settings: Settings, ranks: int) -> Iterator[tuple[int, int]]:
    """ZeRO-3: the same for each sub-group.

    Source: runtime/zero/stage3.py: get_grad_norm_direct, _prepare_sub_group, backup_optimizer; torch 2.13
    optim/adamw.py: _multi_tensor_adamw.
    """
    groups = sub_groups(modules, ranks, settings.zero.sub_group_size)
    if settings.zero.is_offloaded:  # torch's foreach AdamW steps what stays, with a square root of its second moments
        stay = groups[: int((1 - settings.zero.offload_ratio) * len(groups))]
        for shares in stay:
            yield 0, rounded(master_item(settings.step.optimizer) * sum(shares))
        return
    wide, master = accumulation_item(settings), master_item(settings.step.optimizer)
    yield 0, rounded(max((share for shares in groups for share in shares), default=0) * NORM_ITEM)
    for shares in groups:
        size = sum(shares)
        flat = rounded(wide * size) if len(shares) > 1 else 0
        copied = rounded(master * size) if wide != master else 0
        yield 0, flat + copied
        yield 0, (copied or flat) + rounded(TEMPORARIES[settings.step.optimizer] * size)
