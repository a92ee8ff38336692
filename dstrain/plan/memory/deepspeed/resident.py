"""Bytes of one rank between two steps: parameters, master copies, optimizer states, buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstrain.choices import Offload, Optimizer, Precision
from dstrain.plan.configuration import Zero
from dstrain.plan.memory.deepspeed.byte_account import rounded
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.zero12_partitions import layout
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.optimizer_states import (
    EIGHT_BIT_STATE,
    STATES,
    has_master,
    master_item,
    muon_buffers,
    saved_by_muon,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes on the GPU by part."""

    params: int
    """This rank's parameters."""
    flat: int = 0
    """Of these, what ZeRO-1 and 2 copy into flat tensors before the first step."""
    grads: int = 0
    """Gradients that are never freed."""
    optimizer: int = 0
    """Master copy and states."""
    late: int = 0
    """Of these, the states that the first step allocates; `dstrain run` has AdamW's before."""
    buffers: int = 0
    """Buckets and staging buffers."""
    gathered: int = 0
    """Small parameters that ZeRO-3 releases for the step only."""
    secondary: int = 0
    """ZeRO++'s secondary partitions, which the first forward pass makes and the step's end frees; not in `total`."""

    @property
    def total(self) -> int:
        """All bytes held between two steps."""
        return self.params + self.grads + self.optimizer + self.buffers + self.gathered


def accumulation_item(settings: Settings) -> int:
    """Returns the bytes of an element of accumulated gradients."""
    return (settings.step.grad_accum_dtype or settings.model.precision).num_bytes


def communication_item(settings: Settings) -> int:
    """Returns the bytes of an element of a gradient while ranks exchange it: fp32 if they share sequences."""
    return FP32 if settings.parallel.sp > 1 else settings.model.item


def is_wide(settings: Settings) -> bool:
    """Returns whether ZeRO-1 runs on DeepSpeed's BF16_Optimizer, which keeps whole fp32 gradients.

    Source: deepspeed 0.19.8 runtime/engine.py: _do_optimizer_sanity_check.
    """
    return (
        settings.zero.stage == 1
        and settings.model.precision is Precision.BF16
        and settings.step.grad_accum_dtype is Precision.FP32
        and not settings.zero.is_offloaded
    )


def state_sizes(numel: int, optimizer: Optimizer) -> tuple[int, ...]:
    """Returns the bytes of each optimizer state of that many elements, without the master copy."""
    if optimizer is Optimizer.ADAMW_8BIT:
        return (rounded(round(EIGHT_BIT_STATE * numel)),) * 2
    return (rounded(master_item(optimizer) * numel),) * STATES[optimizer]


def _stepped(sizes: Sequence[int], settings: Settings, saved: int) -> dict[str, int]:
    """Returns the bytes of master copies and optimizer states of partitions, and those that the first step allocates.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py, stage3.py: initialize_optimizer_states, which leave it to
    the optimizer.
    """
    optimizer = settings.step.optimizer
    states = sum(sum(state_sizes(size, optimizer)) for size in sizes) - saved
    masters = sum(rounded(master_item(optimizer) * size) for size in sizes)
    return {"optimizer": masters + states, "late": 0 if settings.has_early_states else max(0, states)}


def matrices(modules: Modules) -> int:
    """Returns the trained elements of matrices, which Muon steps."""
    return sum(count * weight.numel for weight, count in modules.counted() if weight.trains and weight.is_matrix)


def _saved_by_muon(modules: Modules, settings: Settings, ranks: int) -> int:
    """Returns the bytes that Muon's states, and what it keeps beside them, are below AdamW's."""
    stepped = matrices(modules)
    saved = saved_by_muon(stepped, settings.model, settings.step, settings.zero, ranks)
    return saved if settings.zero.stage < 3 else max(0, saved - muon_buffers(stepped, settings.model, ranks))


def sub_groups(modules: Modules, ranks: int, size: int) -> list[list[int]]:
    """Returns the partitioned elements of the parameters of each sub-group of ZeRO-3.

    A sub-group is closed by the parameter that reaches `sub_group_size` partitioned elements.
    Source: deepspeed 0.19.8 runtime/zero/stage3.py: _create_fp16_sub_groups.
    """
    groups: list[list[int]] = []
    elements = modules.shares(ranks)
    for group in modules.groups():
        shares = [elements[index] for index in group]
        if size >= sum(shares):
            groups.append(shares)
            continue
        current: list[int] = []
        total = 0
        for share in shares:
            current.append(share)
            total += share
            if total >= size:
                groups.append(current)
                current, total = [], 0
        if current:
            groups.append(current)
    return groups


def num_staying(groups: Sequence[object], zero: Zero) -> int:
    """Returns how many sub-groups the GPU steps although the optimizer is offloaded: the first ones.

    Source: deepspeed 0.19.8 runtime/zero/stage3.py: subgroup_to_device.
    """
    return int((1 - zero.offload_ratio) * len(groups))


def resident(modules: Modules, settings: Settings, ranks: int) -> Resident:
    """Returns the bytes of a rank between two steps, with P trainable and F frozen elements of s bytes over N ranks.

    ZeRO-0: sP + 12P, in fp32 sP + 8P. ZeRO-1, 2: sP + 12P/N. ZeRO-3: (s + 12)P/N, the flat gradient sP/N and the
    bucket. Frozen: sF, or sF/N under ZeRO-3. Of states in bf16 12 is 6.
    Source: deepspeed 0.19.8 runtime/fp16/unfused_optimizer.py, runtime/zero/stage_1_and_2.py, stage3.py: __init__.
    """
    if settings.zero.stage == 3:
        return _sharded(modules, settings, ranks)
    item, less = settings.model.item, _saved_by_muon(modules, settings, ranks)
    weights = modules.weights
    frozen = sum(rounded(item * weight.numel) for weight in weights if not weight.trains)
    trainable = [weight.numel for weight in weights if weight.trains]
    if settings.zero.stage == 0:
        master = FP32 if has_master(settings.model, settings.zero) else 0
        states = sum(rounded(master * n) + sum(state_sizes(n, settings.step.optimizer)) for n in trainable)
        return Resident(params=frozen + sum(rounded(item * n) for n in trainable), optimizer=states - less)
    flat = layout(modules, ranks)
    copied = sum(rounded(item * size) for size in flat.whole)
    params = frozen + copied
    if settings.zero.is_offloaded:
        return Resident(params=params, flat=copied, buffers=rounded(item * max(trainable, default=0)))
    grads = 0
    if is_wide(settings):
        grads = sum(rounded(FP32 * size) for size in flat.whole)
    return Resident(params=params, flat=copied, grads=grads, **_stepped(flat.partitions, settings, less))


def _sharded(modules: Modules, settings: Settings, ranks: int) -> Resident:
    item, offload, hpz = settings.model.item, settings.zero.offload, settings.zero.hpz
    counted = modules.counted()
    trainable = sum(count * weight.share(ranks) for weight, count in counted if weight.trains)
    frozen = sum(count * rounded(weight.share(ranks) * item) for weight, count in counted if not weight.trains)
    least = settings.zero.param_persistence_threshold
    whole = sum(count * rounded(weight.padded(ranks) * item) for weight, count in counted if weight.numel <= least)
    secondary = sum(count * rounded(weight.padded(ranks) * item // hpz) for weight, count in counted) if hpz > 1 else 0
    on_gpu = offload in (Offload.NONE, Offload.OPTIMIZER)
    is_copied = ranks > 1 or not on_gpu
    groups = [sum(shares) for shares in sub_groups(modules, ranks, settings.zero.sub_group_size)]
    stay = groups if offload is Offload.NONE else []
    if offload in (Offload.OPTIMIZER, Offload.PARAMS):
        stay = groups[: num_staying(groups, settings.zero)]
    grads = rounded(trainable * accumulation_item(settings)) if offload is Offload.NONE else 0
    if offload is not Offload.NONE:
        grads = sum(rounded(master_item(settings.step.optimizer) * size) for size in stay)
    return Resident(
        params=(rounded(trainable * item) + frozen) if on_gpu else 0,
        grads=grads,
        **_stepped(stay, settings, _saved_by_muon(modules, settings, ranks)),
        buffers=rounded(settings.zero.reduce_bucket_size * communication_item(settings)),
        gathered=whole if is_copied else 0,
        secondary=secondary,
    )
