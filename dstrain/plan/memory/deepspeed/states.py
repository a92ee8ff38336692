"""Bytes of model states on one rank: on the GPU between two steps, in host RAM, and at the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dstrain.choices import Offload, Optimizer, Precision
from dstrain.plan.configuration import Zero
from dstrain.plan.memory.deepspeed.gradients import NORM_ITEM, layout
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.timeline import Block, Part, Timeline, rounded
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.optimizer_states import (
    EIGHT_BIT_STATE,
    STATES,
    has_master,
    master_item,
    muon_buffers,
    saved_by_muon,
)
from dstrain.plan.memory.zero import pinned


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
    return sum(count * weight.numel for weight, count in modules.counted.items() if weight.trains and weight.is_matrix)


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
    elements = modules.each(lambda weight: weight.share(ranks))
    for group in modules.groups:
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
        return _resident_under_zero3(modules, settings, ranks)
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
    # BF16_Optimizer keeps the sums of all parameters, not of its own partition
    grads = 0
    if settings.is_wide:
        grads = sum(rounded(FP32 * size) for size in flat.whole)
    return Resident(params=params, flat=copied, grads=grads, **_stepped(flat.partitions, settings, less))


def _resident_under_zero3(modules: Modules, settings: Settings, ranks: int) -> Resident:
    item, offload, hpz = settings.model.item, settings.zero.offload, settings.zero.hpz
    counted = modules.counted.items()
    trainable = sum(count * weight.share(ranks) for weight, count in counted if weight.trains)
    frozen = sum(count * rounded(weight.share(ranks) * item) for weight, count in counted if not weight.trains)
    least = settings.zero.param_persistence_threshold
    whole = sum(count * rounded(weight.padded(ranks) * item) for weight, count in counted if weight.numel <= least)
    secondary = sum(count * rounded(weight.padded(ranks) * item // hpz) for weight, count in counted) if hpz > 1 else 0
    on_gpu = offload in (Offload.NONE, Offload.OPTIMIZER)
    # the partition of a rank alone is the whole parameter already
    is_copied = ranks > 1 or not on_gpu
    groups = [sum(shares) for shares in sub_groups(modules, ranks, settings.zero.sub_group_size)]
    stay = groups if offload is Offload.NONE else []
    if offload in (Offload.OPTIMIZER, Offload.PARAMS):
        stay = groups[: num_staying(groups, settings.zero)]
    grads = rounded(trainable * settings.accumulated) if offload is Offload.NONE else 0
    if offload is not Offload.NONE:
        grads = sum(rounded(settings.stepped * size) for size in stay)
    return Resident(
        params=(rounded(trainable * item) + frozen) if on_gpu else 0,
        grads=grads,
        **_stepped(stay, settings, _saved_by_muon(modules, settings, ranks)),
        buffers=rounded(settings.zero.reduce_bucket_size * settings.communicated),
        gathered=whole if is_copied else 0,
        secondary=secondary,
    )


ALWAYS_IN_RAM = 1_000_000_000
"""Elements of parameters that stay in RAM under NVMe offload. Source: deepspeed 0.19.8 runtime/zero/offload_config.py:
max_in_cpu."""
OPTIMIZER_BUFFERS = 4
"""Buffers of the largest sub-group through which states pass from and to NVMe. Source: offload_config.py:
buffer_count; runtime/swap_tensor/optimizer_utils.py: SwapBufferManager."""
PARAMETER_BUFFERS = 5
"""Buffers of the largest parameter's share. Source: offload_config.py;
runtime/swap_tensor/partitioned_param_swapper.py."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Bytes of one rank outside of its GPU."""

    pinned: tuple[int, ...] = ()
    """Page-locked buffers, each with its requested size."""
    pageable: int = 0
    """Other memory."""
    locked: int = 0
    """Page-locked memory that is not rounded up."""
    nvme: int = 0
    """Files on NVMe."""

    @property
    def asked(self) -> int:
        """Requested RAM."""
        return sum(self.pinned) + self.pageable + self.locked

    @cached_property
    def taken(self) -> int:
        """Allocated RAM: each pinned buffer is rounded up to a power of two."""
        return sum(pinned(size) for size in self.pinned) + self.pageable + self.locked


def host(modules: Modules, settings: Settings, ranks: int, rank: int = 0) -> Host:
    """Returns the RAM of a rank, with P trainable and F frozen elements of s bytes over N ranks.

    ZeRO-1, 2: master 4, gradient 4, staging s and states 8 of P/N, and one largest gradient; when micro-batches add up,
    the gradients that touch its partition too. ZeRO-3: flat gradient s, gradients 4, master 4 and states 8 of P/N;
    offloaded parameters s(P + F)/N. In bf16, what has 4 has 2, and micro-batches of ZeRO-1 and 2 add up in place.
    Counted from live tensors of the engine on CPU ranks.
    """
    if not settings.zero.is_offloaded:
        return Host()
    if settings.zero.stage < 3:
        return _host_below_zero3(modules, settings, ranks, rank)
    if settings.zero.offload is Offload.NVME:
        return _host_with_nvme(modules, settings, ranks)
    return _host_under_zero3(modules, settings, ranks)


def _of(pins: bool, sizes: list[int], pageable: int) -> Host:
    return Host(pinned=tuple(sizes), pageable=pageable) if pins else Host(pageable=pageable + sum(sizes))


def _host_below_zero3(modules: Modules, settings: Settings, ranks: int, rank: int) -> Host:
    """Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: __init__, initialize_optimizer_states,
    async_accumulate_grad_in_cpu_via_gpu."""
    flat_layout, item, master = layout(modules, ranks), settings.model.item, settings.stepped
    sizes = [size * count for count in flat_layout.partitions for size in (master, master, item)]
    sizes.append(item * max(flat_layout.numel, default=0))
    if settings.step.grad_accum > 1 and master == FP32:
        sizes += [item * modules.weights[index].numel for index in sorted(flat_layout.parameters_of(rank))]
    states = STATES[settings.step.optimizer] * master * sum(flat_layout.partitions)
    return _of(settings.zero.pin_memory, sizes, states)


def _host_under_zero3(modules: Modules, settings: Settings, ranks: int) -> Host:
    """Source: deepspeed 0.19.8 runtime/zero/stage3.py: _setup_for_real_optimizer, _create_fp32_partitions,
    initialize_optimizer_states, _create_param_groups_fp16_flat_cpu_memory."""
    item, master = settings.model.item, settings.stepped
    groups = [sum(shares) for shares in sub_groups(modules, ranks, settings.zero.sub_group_size)]
    away = groups[num_staying(groups, settings.zero) :]
    flat = settings.accumulated * sum(groups)
    states = (1 + STATES[settings.step.optimizer]) * master * sum(away)
    host = _of(settings.zero.pin_memory, [flat, *(master * size for size in away)], states)
    if settings.zero.offload is not Offload.PARAMS:
        return host
    shares = modules.each(lambda weight: weight.share(ranks))
    whole = [item * sum(shares[index] for index in group) for group in modules.groups]
    frozen = [item * share for weight, share in zip(modules.weights, shares, strict=True) if not weight.trains]
    pins = frozen if settings.zero.pin_memory else []
    return Host(
        pinned=(*host.pinned, *whole, *pins), pageable=host.pageable + (0 if pins or not frozen else sum(frozen))
    )


def _host_with_nvme(modules: Modules, settings: Settings, ranks: int) -> Host:
    """Master, states, gradients and parameters in files; RAM has the flat gradient, buffers, and some parameters.

    Read in the source, not measured. Source: deepspeed 0.19.8 runtime/swap_tensor; stage3.py.
    """
    item, master = settings.model.item, settings.stepped
    groups = [sum(shares) for shares in sub_groups(modules, ranks, settings.zero.sub_group_size)]
    shares = modules.each(lambda weight: weight.share(ranks))
    locked = OPTIMIZER_BUFFERS * master * max(groups, default=0) + PARAMETER_BUFFERS * item * max(shares)
    flat = settings.accumulated * sum(groups)
    kept = item * min(sum(groups), ALWAYS_IN_RAM)
    files = (2 + STATES[settings.step.optimizer]) * master * sum(groups) + item * sum(shares)
    return Host(pinned=(flat, kept), locked=locked, nvme=files)


def step(modules: Modules, settings: Settings, ranks: int, rank: int, late: int) -> list[Block]:
    """Returns the allocations and frees of the optimizer step on one rank, beside the gradients that the backward pass
    has left: all of them under ZeRO-0, the gradient partition under ZeRO-1 and 2.

    Of the optimizer states the step allocates `late` bytes.
    """
    written = _Step(late)
    if settings.zero.stage == 0:
        _step_of_zero0(written, modules, settings)
    elif settings.zero.stage == 3:
        _step_under_zero3(written, modules, settings, ranks)
    elif not settings.zero.is_offloaded and not settings.is_wide:
        _step_below_zero3(written, modules, settings, ranks, rank)
    elif not settings.zero.is_offloaded:
        for size in layout(modules, ranks).partitions:
            written.add_states(size, settings.step.optimizer)
    return written.events


class _Step(Timeline):
    """The timeline of a step."""

    __slots__ = ("late",)

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        """Bytes of optimizer states that have yet to be allocated."""

    def add_states(self, numel: int, optimizer: Optimizer) -> None:
        """Allocates the optimizer states of that many elements, which stay."""
        for size in state_sizes(numel, optimizer):
            self.add(Part.STATES, min(size, self.late))
            self.late -= min(size, self.late)

    def group(self, settings: Settings, numel: int, flat: int, copied: int) -> None:
        """Steps a group: its flat gradients become a copy in the master copy's dtype, or stay, while the optimizer
        works."""
        gradients = self.add(Part.BUFFERS, flat)
        if copied:
            wide = self.add(Part.BUFFERS, copied)
            self.remove(gradients)
            gradients = wide
        self.add_states(numel, settings.step.optimizer)
        self.remove(gradients)


def _step_of_zero0(written: _Step, modules: Modules, settings: Settings) -> None:
    """ZeRO-0: a norm in fp32, then fp32 gradients of everything beside the others.

    Source: deepspeed 0.19.8 runtime/fp16/unfused_optimizer.py: step.
    """
    numels = [weight.numel for weight in modules.weights if weight.trains]
    copies = 0 if settings.model.precision is Precision.FP32 else FP32
    written.passing(Part.BUFFERS, rounded(FP32 * max(numels, default=0)))
    written.passing(Part.BUFFERS, sum(rounded(copies * numel) for numel in numels))


def _step_below_zero3(written: _Step, modules: Modules, settings: Settings, ranks: int, rank: int) -> None:
    """ZeRO-1 and 2: a norm in fp64 of one tensor at a time; group by group a flat copy, then one as the master copy.

    Muon's updates are beside the gradients. Source: runtime/zero/stage_1_and_2.py: get_grad_norm_direct,
    _get_flat_partition_unpadded, step.
    """
    flat_layout = layout(modules, ranks)
    item, wide, master = settings.model.item, settings.accumulated, settings.stepped
    slices = flat_layout.slices.items()
    mine = [numel for weight, parts in slices for at, numel in parts if flat_layout.is_of(rank, weight, at)]
    written.passing(Part.BUFFERS, rounded(max(mine, default=0) * NORM_ITEM))
    if settings.step.optimizer is Optimizer.MUON:
        updated = matrices(modules) // ranks
        updates = written.add(Part.GRADS, rounded(item * updated))
        for size in (updated, sum(flat_layout.partitions) - updated):
            written.group(settings, size, rounded(item * size), rounded(master * size) if wide != master else 0)
        written.remove(updates)
        return
    for group, size in zip(modules.groups, flat_layout.partitions, strict=True):
        tensors = sum(flat_layout.is_of(rank, weight, at) for weight in group for at, _ in flat_layout.slices[weight])
        flat = rounded(item * size) if tensors > 1 and wide == item else 0
        written.group(settings, size, flat, rounded(master * size) if wide != master else 0)


def _step_under_zero3(written: _Step, modules: Modules, settings: Settings, ranks: int) -> None:
    """ZeRO-3: the same for each sub-group.

    Source: runtime/zero/stage3.py: get_grad_norm_direct, _prepare_sub_group, backup_optimizer; torch 2.13
    optim/adamw.py: _multi_tensor_adamw.
    """
    groups = sub_groups(modules, ranks, settings.zero.sub_group_size)
    wide, master = settings.accumulated, settings.stepped
    if settings.zero.is_offloaded:  # torch's foreach AdamW steps what stays, with a square root of its second moments
        for shares in groups[: num_staying(groups, settings.zero)]:
            written.group(settings, sum(shares), rounded(master * sum(shares)), 0)
        return
    largest = max((share for shares in groups for share in shares), default=0)
    written.passing(Part.BUFFERS, rounded(largest * NORM_ITEM))
    for shares in groups:
        size = sum(shares)
        flat = rounded(wide * size) if len(shares) > 1 else 0
        written.group(settings, size, flat, rounded(master * size) if wide != master else 0)
