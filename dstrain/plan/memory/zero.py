"""Bytes of model states on each GPU and host under every ZeRO stage and offload, as DeepSpeed 0.19 holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dstrain.choices import Offload, Optimizer
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.configuration import Configuration, Zero
from dstrain.plan.memory.optimizer_states import master_item, saved_by_muon, stepped_bytes_per_param
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM, NF4_SCALE_BYTES_PER_PARAM, Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Model states of one rank in bytes: on the GPU, and of the same rank on its host."""

    params: int
    """Parameters on the GPU."""
    grads: int
    """Gradients on the GPU when the optimizer steps."""
    optimizer: int
    """fp32 master copy and both Adam moments on the GPU."""
    host: int = 0
    """Offloaded states in host RAM, before pinned memory rounds them up."""
    staging: int = 0
    """Host buffers through which offloaded states pass."""
    nvme: int = 0
    """Offloaded states on NVMe."""

    @property
    def device(self) -> int:
        """All model states on the GPU."""
        return self.params + self.grads + self.optimizer


def sharing_ranks(cluster: Cluster, configuration: Configuration) -> int:
    """Returns how many ranks share states, sequence-parallel ranks included."""
    return max(1, cluster.num_gpus // configuration.parallel.tp)


def states(counts: Trained, configuration: Configuration, num_ranks: int) -> States:
    """Returns the model states of one rank, with P trainable and F frozen parameters of s bytes over N ranks.

    With AdamW, ZeRO-0: sP + sP + 12P, in fp32 8P. ZeRO-1 and 2: sP + sP/N + 12P/N when the optimizer steps.
    ZeRO-3: (s + s + 12)P/N. Other optimizers have `optimizer_bytes_per_param` in place of 12.
    Under ZeRO-1 and 2 a gradient that lies across two partitions, whole on both ranks, is counted once.
    Frozen parameters cost sF, sF/N under ZeRO-3; the scales of 4-bit weights are whole on every GPU. An optimizer on
    the CPU takes gradients and optimizer states there: 16P/N in host RAM (master 4, gradient 4, moments 8) and sP/N of
    staging; parameters on the CPU another sP/N. The part that `staying` leaves on the GPU has 12 bytes and an fp32
    gradient there. All of it is half as large in bf16.
    Source: ZeRO (arXiv 1910.02054), table 1; the engine's own tensors on 2 CPU ranks are compared with it in the tests.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> qwen3_8b = Trained(trainable=8_190_735_360, frozen=0, quantized=0, largest_trainable=0)
    >>> states(qwen3_8b, changed(DEFAULTS, zero_stage=3), 8).device == 16 * 8_190_735_360 // 8
    True
    """
    s, stage, offload = configuration.model.item, configuration.zero.stage, configuration.zero.offload
    params, scales = weight_bytes(counts, configuration, num_ranks), round(NF4_SCALE_BYTES_PER_PARAM * counts.quantized)
    partition = partition_of(counts, configuration, num_ranks)
    per_param, item = stepped_bytes_per_param(configuration), master_item(configuration.step.optimizer)
    if offload is Offload.NONE:
        less = saved_by_muon(counts.matrices, configuration.model, configuration.step, configuration.zero, num_ranks)
        optimizer = round(per_param * partition) - less
        kept = partition + (muon_updates(counts, configuration, num_ranks) if stage in (1, 2) else 0)
        return States(params=params + scales, grads=round(s * kept), optimizer=optimizer)
    if offload is Offload.NVME:
        # files hold master, gradient, moments and parameters; RAM the flat gradient and four sub-groups in work
        work = s * partition + 4 * 4 * item * min(partition, configuration.zero.sub_group_size)
        return States(
            params=scales, grads=0, optimizer=0, staging=round(work), nvme=round(4 * item * partition) + params
        )
    stays = staying(configuration, partition)
    host = round(4 * item * (partition - stays))
    copies = 2 if stage < 3 and configuration.step.grad_accum > 1 else 1
    staging = round(copies * s * partition)
    if offload is Offload.PARAMS:
        return States(params=scales, grads=0, optimizer=0, host=host + params, staging=staging)
    on_gpu = {"grads": round(item * stays), "optimizer": round(per_param * stays)}
    return States(params=params + scales, **on_gpu, host=host, staging=staging)


def weight_bytes(counts: Trained, configuration: Configuration, num_ranks: int) -> int:
    """Returns the bytes of the parameters that one rank has, on the GPU or offloaded, without 4-bit scales."""
    share = num_ranks if configuration.zero.stage == 3 else 1
    trainable = counts.everywhere if configuration.zero.stage == 3 else counts.trainable
    four_bit = (NF4_BYTES_PER_PARAM - NF4_SCALE_BYTES_PER_PARAM) * counts.quantized
    return round((configuration.model.item * (trainable + counts.frozen) + four_bit) / share)


def muon_updates(counts: Trained, configuration: Configuration, num_ranks: int) -> float:
    """Returns the elements of Muon's updates that a rank of ZeRO-1 and 2 has at the step beside its gradients."""
    return counts.matrices / num_ranks if configuration.step.optimizer is Optimizer.MUON else 0


def partition_of(counts: Trained, configuration: Configuration, num_ranks: int) -> float:
    """Returns the trainable elements whose optimizer states one rank has."""
    return counts.everywhere / num_ranks if configuration.zero.stage else counts.trainable


def staying(configuration: Configuration, partition: float) -> float:
    """Returns the elements of a rank's partition that the GPU steps although the optimizer is offloaded: the first
    sub-groups, as many as `offload_ratio` leaves there. Weights without decay are one more, small group at the end.

    Source: deepspeed 0.19.8 runtime/zero/stage3.py: subgroup_to_device, _create_fp16_sub_groups.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> quarter = changed(DEFAULTS, zero_stage=3, offload=Offload.OPTIMIZER, offload_ratio=0.25, sub_group_size=100)
    >>> staying(quarter, 1050)
    900
    """
    size = configuration.zero.sub_group_size
    num_groups = math.ceil(partition / size) + configuration.model.is_full if size else 1
    return min(partition, int((1 - configuration.zero.offload_ratio) * num_groups) * size)


def prefetch_bytes(configuration: Configuration) -> int:
    """Returns the bytes of what ZeRO-3 gathers ahead at most: the gathered buffer, then copies of it as parameters.

    With qwZ the buffer is in 8 bits and then, beside them, in fp16.
    Source: deepspeed 0.19.8 runtime/zero/partition_parameters.py: AllGatherCoalescedHandle.wait.
    """
    elements = min(configuration.zero.prefetch_bucket_size, configuration.zero.max_live_parameters)
    item = configuration.model.item
    return (item + (3 if configuration.zero.qwz else item)) * elements


def num_buckets(zero: Zero) -> int:
    """Returns how many buffers of `reduce_bucket_size` elements the engine allocates, whatever the model has: two under
    ZeRO-1 and 2 where communication overlaps, else one.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: setup_buckets; stage3.py: _setup_for_real_optimizer.
    """
    return 2 if zero.stage in (1, 2) and zero.overlap_comm else 1


def bucket_bytes(configuration: Configuration, trainable: int | None) -> int:
    """Returns the bytes of each GPU that the engine's buckets take at most: s·rb for each of them, and once more the
    flat copy that is reduced, which is no larger than the gradients of `trainable` elements (None: not known).

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: allreduce_bucket (flatten); stage3.py: __avg_scatter_grads;
    compared with the replay of the engine in the tests.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> bucket_bytes(changed(DEFAULTS, zero_stage=2, overlap_comm=True, reduce_bucket_size=100), None)
    600
    """
    elements = configuration.zero.reduce_bucket_size
    copied = elements if trainable is None else min(elements, trainable)
    buckets = num_buckets(configuration.zero) * elements + copied
    return configuration.model.item * buckets if configuration.zero.stage else 0


def sub_group_bytes(configuration: Configuration, partition: float | None) -> int:
    """Returns the bytes that stepping one sub-group of ZeRO-3 takes: its gradients flat (s) and, unless it is that,
    in the dtype of the master copy on the GPU; where the optimizer is offloaded only the latter, in host RAM. A rank
    has `partition` elements.

    Source: deepspeed 0.19.8 runtime/zero/stage3.py: _prepare_sub_group, _create_fp32_partitions.
    """
    elements = configuration.zero.sub_group_size
    item, master = configuration.model.item, master_item(configuration.step.optimizer)
    flat = 0 if configuration.zero.is_offloaded else item
    copied = 0 if flat == master else master
    return round((flat + copied) * (elements if partition is None else min(elements, partition)))


def gathered_bytes(counts: Trained, configuration: Configuration, unit_numel: int) -> int:
    """Returns the bytes of parameters that ZeRO-3 holds whole while the largest unit of `unit_numel` elements works.

    The unit itself, twice the prefetch bucket (gathered buffer, then its copies) and, around the turn from forward to
    backward, the last max_reuse_distance / 2 elements, which are used again that soon; never more than
    the model. hpZ adds its second copy, 1/hpZ of what was given back, from the second micro-batch on of all.
    Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: __params_to_release, fetch_sub_module.
    """
    if configuration.zero.stage != 3:
        return 0
    zero, item = configuration.zero, configuration.model.item
    total = counts.trainable + counts.frozen + counts.quantized
    whole = min(total, unit_numel + zero.max_reuse_distance // 2)
    copied = total if configuration.step.grad_accum > 1 else total - whole
    copy = item * copied // zero.hpz if zero.hpz > 1 else 0
    return copy + min(item * total, item * whole + prefetch_bytes(configuration))


def pinned(count: float) -> int:
    """Returns the actual bytes of a pinned allocation: the next power of two.

    Source: torch 2.13 CachingHostAllocator; pytorch#95823, DeepSpeed#7250.

    >>> pinned(5), pinned(4)
    (8, 4)
    """
    return 1 << (max(1, round(count)) - 1).bit_length()
