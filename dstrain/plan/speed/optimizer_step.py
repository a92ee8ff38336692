"""The cost of the optimizer and of offloading: bytes through the GPU, PCIe, host RAM and NVMe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.choices import Offload, Optimizer
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.optimizer_states import master_item
from dstrain.plan.memory.zero import sharing_ranks
from dstrain.plan.speed.efficiency import CPU_ADAM_BYTES_PER_PARAM, PAGEABLE_RATIO, Efficiency
from dstrain.plan.speed.flops import peak_flops_per_s
from dstrain.plan.speed.traffic import Work

KERNEL_BYTES_PER_PARAM: Mapping[Optimizer, float] = MappingProxyType(
    {
        Optimizer.ADAMW: 28.0,  # parameter, both moments read and written, gradient read
        Optimizer.ADAMW_8BIT: 16.0,  # moments of one byte
        Optimizer.ADAMW_BF16: 14.0,  # AdamW's in bf16
        Optimizer.LION: 20.0,  # one moment
        Optimizer.SGD: 12.0,  # none
        Optimizer.MUON: 28.0,  # moment and its copy
    }
)
"""Bytes that the optimizer's kernel moves for each parameter, in fp32 but where said. Source: torch 2.13 FusedAdamW;
bitsandbytes kOptimizerStatic8bit2StateBlockwise."""

EIGHT_BIT_PARAMS_PER_S = 36.6e9 / 132
"""Parameters that one multiprocessor steps with moments of 8 bits in a second, where memory is no limit. Source: an
H200 takes 14.7 ms for 2^29, three times as long as for fused AdamW (benchmarks/results/gpu_kernels-h200.json)."""

MASTER_COPIES_BYTES_PER_PARAM: Mapping[int, float] = MappingProxyType({4: 28.0, 2: 16.0})
"""Bytes that DeepSpeed's step moves besides, by the bytes of a master weight. In fp32: gradient flattened 4, to fp32 6,
its norm 4, scaled 8, new weight to bf16 6. In bf16: flattened 4, its norm 4, scaled 4, new weight copied 4.
Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: step."""

BUCKET_BYTES_PER_PARAM: Mapping[int, float] = MappingProxyType({0: 8.0, 1: 8.0, 2: 8.0, 3: 12.0})
"""Bytes moved on the GPU to reduce a gradient: copied into the bucket 4, divided 4, under ZeRO-3 put in order 4.
Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: copy_grads_in_partition, average_tensor;
runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced."""

ACCUMULATE_BYTES_PER_PARAM = 6.0
"""Bytes moved to add a gradient to the previous micro-batch's."""

GATHER_BYTES_PER_PARAM = 4.0
"""Bytes moved to put gathered shards together. Source: deepspeed 0.19.8 runtime/zero/partition_parameters.py:
AllGatherCoalescedHandle.wait."""

QWZ_BYTES_PER_PARAM = 11.0
"""The same with qwZ: read in 8 bits and written in fp16, put together, then cast. Source: as above."""

NVME_READ_BYTES_PER_PARAM = 16.0
"""Master copy, moments and gradient. Source: deepspeed 0.19.8 runtime/swap_tensor/partitioned_optimizer_swapper.py."""
NVME_WRITE_BYTES_PER_PARAM = 14.0
"""Master copy, moments and the bf16 parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """Seconds beside computation and collectives."""

    optimizer: float
    """Optimizer and the engine's copies on the GPU, in a step."""
    cpu_optimizer: float
    """CPU Adam, in a step."""
    nvme: float
    """Drives, in a step."""
    pcie_step: float
    """Updated parameters to the GPU, in a step."""
    pcie_forward: float
    """Copies in every forward pass."""
    pcie_backward: float
    """Copies in every backward pass."""
    is_pcie_hidden: bool
    """Whether copies in a pass overlap with computation."""


def stepping(cluster: Cluster, configuration: Configuration, work: Work, rates: Efficiency) -> Stepping:
    """Returns the seconds that optimizer, engine and offloading take, with P trainable parameters over N ranks.

    An optimizer on the CPU: gradients down to the host, 4 B if master weights are fp32 there (2 B down and up for
    each micro-batch before), CPU Adam at 29 B of DRAM traffic, 2 B of parameters back up. Parameters on the CPU: every
    shard up twice in a micro-batch, instead. NVMe: all of that from and to drives besides.
    Source: ZeRO-Offload (arXiv 2101.06840), section 4; deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:
    async_inplace_copy_grad_to_fp32_buffer_from_gpu.
    """
    c, counts = configuration, work.counts
    ranks = sharing_ranks(cluster, c)
    share = counts.trainable / c.parallel.tp / (ranks if c.zero.stage else 1)
    # a partial offload (Twin-Flow) exists in ZeRO-3 alone; the other stages take all or nothing
    offloaded = share * (c.zero.offload_ratio if c.zero.stage == 3 else 1.0) if c.zero.is_offloaded else 0.0
    shards = c.model.item * (counts.trainable + counts.frozen) / c.parallel.tp / ranks
    pcie = rates.pcie_bytes_per_s * (1.0 if c.zero.pin_memory else PAGEABLE_RATIO)
    forward = inputs_bytes(c, work) if c.checkpointing.offload else 0.0
    backward = forward + (offloaded * (master_item(c.step.optimizer) + 2 * (c.step.grad_accum - 1)) / c.step.grad_accum)
    up = offloaded * c.model.item
    if c.zero.offloads_params:
        # shards go up anyway with the next forward pass, so nothing goes up at the end of the step
        forward, backward, up = forward + shards, backward + shards, 0.0
    per_node = offloaded * cluster.gpus_per_node
    on_drives = c.zero.offload is Offload.NVME
    params_read = 2 * c.step.grad_accum * shards * cluster.gpus_per_node if on_drives else 0.0
    read = NVME_READ_BYTES_PER_PARAM * per_node + params_read if on_drives else 0.0
    written = NVME_WRITE_BYTES_PER_PARAM * per_node if on_drives else 0.0
    return Stepping(
        optimizer=_gpu_bytes(c, work, share - offloaded, ranks, rates.overlap_slowdown) / rates.hbm_bytes_per_s
        + _counting_seconds(cluster, c, share - offloaded, rates)
        + _orthogonalizing_seconds(cluster, c, counts.muon_flops, rates),
        cpu_optimizer=per_node * _cpu_bytes_per_param(c) / rates.cpu_adam_bytes_per_s,
        nvme=read / rates.nvme_read_bytes_per_s + written / rates.nvme_write_bytes_per_s,
        pcie_step=up / pcie,
        pcie_forward=forward / pcie,
        pcie_backward=backward / pcie,
        is_pcie_hidden=_copies_are_hidden(c),
    )


def inputs_bytes(configuration: Configuration, work: Work) -> float:
    """Returns the bytes of the inputs of all recomputed layers of one micro-batch, which go down and up again."""
    c = configuration
    every_layer = c.batch.tokens / c.parallel.sp * work.layer_width * c.model.item
    return every_layer * c.checkpointing.share(work.num_layers)


def _copies_are_hidden(configuration: Configuration) -> bool:
    """Returns whether copies in a pass overlap with computation: pinned ones, on a stream of their own."""
    c = configuration
    overlaps = c.zero.overlap_comm or not c.zero.is_offloaded
    return c.zero.pin_memory and overlaps and (c.code.inputs_in_flight > 0 or not c.checkpointing.offload)


def _cpu_bytes_per_param(c: Configuration) -> float:
    """Returns the DRAM traffic of a parameter's step on the CPU: CPU Adam's, less with fewer or smaller states."""
    ratio = KERNEL_BYTES_PER_PARAM[c.step.optimizer] / KERNEL_BYTES_PER_PARAM[Optimizer.ADAMW]
    return CPU_ADAM_BYTES_PER_PARAM * ratio * (1.0 if c.code.sharding is None else c.code.sharding.cpu_step_ratio)


def _counting_seconds(cluster: Cluster, c: Configuration, stepped: float, rates: Efficiency) -> float:
    """Returns by how much the arithmetic of 8-bit moments takes longer than their bytes."""
    count = cluster.gpu.num_multiprocessors
    if c.step.optimizer is not Optimizer.ADAMW_8BIT or not count:
        return 0.0
    moving = KERNEL_BYTES_PER_PARAM[Optimizer.ADAMW_8BIT] / rates.hbm_bytes_per_s
    return stepped * max(0.0, 1 / (EIGHT_BIT_PARAMS_PER_S * count) - moving)


def _orthogonalizing_seconds(cluster: Cluster, c: Configuration, flops: float, rates: Efficiency) -> float:
    """Returns the seconds in which Muon orthogonalises matrices on the GPU, which ranks share unless the optimizer is
    offloaded.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: get_flat_partition, _apply_muon_updates_cpu_offload;
    stage3.py: _muon_update_sub_group. An H200 takes 0.13 s longer for Qwen3-1.7B than with AdamW, beside other work, of
    which this is 0.09 (benchmarks/results/recipes-h200.json).
    """
    if c.step.optimizer is not Optimizer.MUON:
        return 0.0
    ranks = cluster.num_gpus if c.zero.stage and not c.zero.is_offloaded else 1
    peak = peak_flops_per_s(cluster.gpu, c.model.precision)
    return flops / ranks / (peak * rates.gemm_ratio)


def _gpu_bytes(c: Configuration, work: Work, stepped: float, ranks: int, slowdown: float) -> float:
    """Returns the bytes that the optimizer, of `stepped` parameters, and the engine move on the GPU in one step.

    Copies on the engine's own streams count like a hidden collective.
    """
    if c.code.sharding is not None:
        return c.code.sharding.step_bytes(c, work, stepped, ranks)
    kernel = KERNEL_BYTES_PER_PARAM[c.step.optimizer] + MASTER_COPIES_BYTES_PER_PARAM[master_item(c.step.optimizer)]
    return stepped * kernel + (slowdown if c.zero.overlap_comm else 1.0) * _engine_bytes(c, work)


def _engine_bytes(c: Configuration, work: Work) -> float:
    """Returns the bytes that DeepSpeed's buckets and gathers move on the GPU in one step."""
    trainable = work.counts.trainable / c.parallel.tp
    if c.parallel.ep > 1:
        trainable -= work.num_expert_params * (1 - 1 / c.parallel.ep)
    reduced = BUCKET_BYTES_PER_PARAM[c.zero.stage] * trainable
    if c.zero.stage < 2:
        return reduced + (c.step.grad_accum - 1) * ACCUMULATE_BYTES_PER_PARAM * trainable
    gathered = 0.0
    if c.zero.stage == 3:
        per_param = QWZ_BYTES_PER_PARAM if c.zero.qwz else GATHER_BYTES_PER_PARAM
        gathered = 2 * per_param * (trainable + work.counts.frozen / c.parallel.tp)
    return c.step.grad_accum * (reduced + gathered)
