"""Host RAM and NVMe of one rank if the optimizer or parameters are offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dstrain.choices import Offload
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.resident import accumulation_item, num_staying, sub_groups
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.zero12_partitions import layout
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.optimizer_states import STATES, master_item
from dstrain.plan.memory.zero import pinned

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
        return _partitioned(modules, settings, ranks, rank)
    if settings.zero.offload is Offload.NVME:
        return _nvme(modules, settings, ranks)
    return _sharded(modules, settings, ranks)


def _of(pins: bool, sizes: list[int], pageable: int) -> Host:
    return Host(pinned=tuple(sizes), pageable=pageable) if pins else Host(pageable=pageable + sum(sizes))


def _partitioned(modules: Modules, settings: Settings, ranks: int, rank: int) -> Host:
    """Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: __init__, initialize_optimizer_states,
    async_accumulate_grad_in_cpu_via_gpu."""
    flat_layout, item, master = layout(modules, ranks), settings.model.item, master_item(settings.step.optimizer)
    sizes = [size * count for count in flat_layout.partitions for size in (master, master, item)]
    sizes.append(item * max(flat_layout.numel, default=0))
    if settings.step.grad_accum > 1 and master == FP32:
        sizes += [item * modules.weights[index].numel for index in sorted(flat_layout.parameters_of(rank))]
    states = STATES[settings.step.optimizer] * master * sum(flat_layout.partitions)
    return _of(settings.zero.pin_memory, sizes, states)


def _sharded(modules: Modules, settings: Settings, ranks: int) -> Host:
    """Source: deepspeed 0.19.8 runtime/zero/stage3.py: _setup_for_real_optimizer, _create_fp32_partitions,
    initialize_optimizer_states, _create_param_groups_fp16_flat_cpu_memory."""
    item, master = settings.model.item, master_item(settings.step.optimizer)
    groups = [sum(shares) for shares in sub_groups(modules, ranks, settings.zero.sub_group_size)]
    away = groups[num_staying(groups, settings.zero) :]
    flat = accumulation_item(settings) * sum(groups)
    states = (1 + STATES[settings.step.optimizer]) * master * sum(away)
    host = _of(settings.zero.pin_memory, [flat, *(master * size for size in away)], states)
    if settings.zero.offload is not Offload.PARAMS:
        return host
    shares = modules.shares(ranks)
    whole = [item * sum(shares[index] for index in group) for group in modules.groups()]
    frozen = [item * share for weight, share in zip(modules.weights, shares, strict=True) if not weight.trains]
    pins = frozen if settings.zero.pin_memory else []
    return Host(
        pinned=(*host.pinned, *whole, *pins), pageable=host.pageable + (0 if pins or not frozen else sum(frozen))
    )


def _nvme(modules: Modules, settings: Settings, ranks: int) -> Host:
    """Master, states, gradients and parameters in files; RAM has the flat gradient, buffers, and some parameters.

    Read in the source, not measured. Source: deepspeed 0.19.8 runtime/swap_tensor; stage3.py.
    """
    item, master = settings.model.item, master_item(settings.step.optimizer)
    groups = [sum(shares) for shares in sub_groups(modules, ranks, settings.zero.sub_group_size)]
    shares = modules.shares(ranks)
    locked = OPTIMIZER_BUFFERS * master * max(groups, default=0) + PARAMETER_BUFFERS * item * max(shares)
    flat = accumulation_item(settings) * sum(groups)
    kept = item * min(sum(groups), ALWAYS_IN_RAM)
    files = (2 + STATES[settings.step.optimizer]) * master * sum(groups) + item * sum(shares)
    return Host(pinned=(flat, kept), locked=locked, nvme=files)
