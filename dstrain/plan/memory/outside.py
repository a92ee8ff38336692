"""GPU memory outside of PyTorch's allocator: the CUDA context by GPU, NCCL's buffers by communicator."""

from __future__ import annotations

from dstrain.facts.cluster.calibration import NOTHING, Measured
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.cluster.gpus import Gpu
from dstrain.plan.configuration import Configuration
from dstrain.units import MIB

LOADED_BYTES = 450 * MIB
"""Driver and the kernels of PyTorch, cuBLAS, flash attention and NCCL that training loads into a context. Source: with
the stack below, 0.65 GiB on an A100; stas00/ml-engineering finds 0.47 to 0.92 GiB on A100 and H100, pytorch#107667 300
MB before any training. Published runs on A100 (fms-acceleration a100_80gb.csv) have 1.7 GiB, perhaps with all kernels
loaded at the start: a property of the machine, to be calibrated."""
HOPPER_LOADED_BYTES = 1499 * MIB
"""The same on Hopper. Source: `dstrain run` on an H200 (PyTorch 2.11, CUDA 13.0, driver 580.159): 1,355 MiB outside of
PyTorch after the first step and 1,763 MiB from the eighth on, the stack below included."""
STACK_BYTES = 1024
"""Local memory that a context reserves for each thread that can be resident. Source: CUDA Programming Guide,
cudaLimitStackSize."""
UNLISTED_BYTES = 666 * MIB
"""The context of any other GPU: an A100's."""

CONNECTION_BYTES = 12 * MIB
"""Memory of one connection of one channel on the receiving GPU: buffers of its three protocols, 4 + 4.7 + 0.5 MiB, in
10, and 2 for what both sides share. Source: NVIDIA/nccl src/include/device.h (NCCL_LL128_ELEMS_PER_THREAD and others);
nccl#1685 counts allocations of 10 and 2 MiB."""
CONNECTIONS = 2
"""Connections of a channel on one node: ring and tree."""
CONNECTIONS_BETWEEN_NODES = 3
"""The same over several nodes, where a rank has a neighbour in the tree more. Source: nccl#864: the number grows up to
two nodes and not beyond."""
RING_CHANNELS = 24
"""Channels of a communicator over NVLink. Source: NCCL's logs of A100 and H100, 12 links twice; from memory."""
PCIE_CHANNELS = 4
"""The same over PCIe, where buffers between GPUs without peer access lie in host RAM."""
SENDING_CHANNELS = 32
"""Channels between any two GPUs of a node that exchange messages of their own, as in an all-to-all. Source: nccl#1685:
32 on eight H100, whose first all-to-all takes 3.3 GB."""
SHARED_NETWORK_BYTES = 512 * MIB
"""Memory that all such messages between nodes share. Source: nccl#2363: 536870912 bytes."""


def outside_bytes(cluster: Cluster, configuration: Configuration, measured: Measured = NOTHING) -> int:
    """Returns the bytes of one GPU outside of PyTorch: context and NCCL, as measured or the rules above; 0 on CPUs."""
    if cluster.gpu.is_cpu:
        return 0
    context = context_bytes(cluster.gpu) if measured.context_bytes is None else measured.context_bytes
    nccl = nccl_bytes(cluster, configuration)
    if measured.nccl_bytes is not None and cluster.num_gpus > 1:
        nccl = measured.nccl_bytes
    return context + nccl


def context_bytes(gpu: Gpu) -> int:
    """Returns the bytes of a CUDA context in training: loaded code, and the stacks of all threads.

    >>> from dstrain.facts.cluster.gpus import gpu
    >>> [context_bytes(gpu(name)) // MIB for name in ("a100-80g", "h100-sxm", "rtx-3090", "t4")]
    [666, 1763, 573, 490]
    """
    if not gpu.num_multiprocessors:
        return UNLISTED_BYTES
    loaded = HOPPER_LOADED_BYTES if gpu.compute_capability == (9, 0) else LOADED_BYTES
    return loaded + STACK_BYTES * gpu.num_multiprocessors * gpu.threads


def nccl_bytes(cluster: Cluster, configuration: Configuration) -> int:
    """Returns the bytes of NCCL's buffers: of rings and trees of each communicator, and of all-to-alls.

    DeepSpeed reduces on a copy of the world's group, so the original connects only its tree, for barriers; ZeRO++'s
    nodes, sequence, tensor and expert parallel ranks have a communicator each. Source: deepspeed 0.19.8
    utils/groups.py: _clone_world_group; NCCL connects rings and trees when they are first used (2.22 and later).
    """
    if cluster.num_gpus == 1:
        return 0
    c = configuration
    is_nvlink = not cluster.intra_link.name.startswith("pcie")
    channels = RING_CHANNELS if is_nvlink else PCIE_CHANNELS
    connections = CONNECTIONS if cluster.num_nodes == 1 else CONNECTIONS_BETWEEN_NODES
    groups = [c.zero.hpz if c.zero.stage == 3 else 1, c.parallel.sp, c.parallel.tp, c.parallel.ep]
    communicators = 1 + sum(ranks > 1 for ranks in groups)
    total = (communicators * connections + (c.code.sharding is None)) * channels * CONNECTION_BYTES
    for ranks in (c.parallel.sp, c.parallel.ep):
        if ranks > 1:
            peers = min(ranks, cluster.gpus_per_node) - 1
            total += peers * (SENDING_CHANNELS if is_nvlink else PCIE_CHANNELS) * CONNECTION_BYTES
            total += SHARED_NETWORK_BYTES * (ranks * c.parallel.tp > cluster.gpus_per_node)
    return total
