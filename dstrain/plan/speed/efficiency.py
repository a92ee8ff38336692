"""Priors of the step time: the share of the data sheet that hardware reaches, each with its source.

A calibration of the same GPU replaces the priors that it measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from dstrain.facts.cluster.calibration import NOTHING, Measured
from dstrain.facts.cluster.cluster import LINKS, Cluster, Link
from dstrain.facts.cluster.gpus import Gpu
from dstrain.units import MIB

HALF_WAVE = 1_000_000.0
"""Results that half of a GPU's multiprocessors compute at once, which the last, partly filled wave of tiles of a matrix
product wastes on average: 120 × 128 × 128 / 2. Source: NVIDIA, Matrix Multiplication Background User's Guide, wave
quantization."""

HALF_TILE = 64.0
"""Rows of an expert that the last tile of 128 wastes. Source: the same guide, tile quantization."""

GROUPED_RATIO = 0.80
"""Speed of one grouped matrix product over all experts, relative to a dense one. Source: from memory; NeMo AutoModel
publishes 277 TFLOP/s for Qwen3-30B-A3B where dense models reach 390."""

SHORT_SEQUENCE = 700.0
"""Sequence length at which attention reaches half of its speed: s / (s + 700). Source: triton#1917 (A100) and
triton#2459 (H100), TFLOP/s of causal attention at 1k to 16k."""

MASKED_ATTENTION_RATIO = 0.4
"""Speed of PyTorch's memory-efficient attention, which takes a padding mask, relative to flash attention, which does
not. Source: flash-attention#416 (0.3), NVIDIA/TileGym#49 (0.43)."""

CALL_KERNELS = (2.0, 4.0)
"""Kernels of one more call of attention in a layer, forward and backward: it, and the parts put together again.
Source: an H200 takes 57 ms for 512 samples one by one, 1.9 ms at once (benchmarks/results/gpu_kernels-h200.json)."""

HBM_RATIO = 0.85
"""Bandwidth of elementwise kernels over the data sheet's. Source: from memory; a copy on an A100 reaches 1.75 TB/s."""

CACHED_READS = 0.55
"""Share of elementwise traffic that reads what the kernel before has written, which the level-2 cache serves if it
holds that kernel's input and output. Source: reads over all traffic in the traces of `kernel_costs`."""
CACHE_SPEED = 4.0
"""Bandwidth of that cache over the memory's. Source: from memory; some 5 TB/s on an RTX 4090, of 1.0."""

LAUNCH_S = 18e-6
"""CPU time of one kernel in eager PyTorch, Python and autograd included, forward and backward on average. Source: 11 µs
measured for Transformers 5.23's Llama layers on tensors too small to count (one core of an AMD EPYC, torch 2.13), and 7
µs of cudaLaunchKernel beside an H200; Qwen3-0.6B takes 20 there, as does published fine-tuning of litgpt."""

HOOK_S: Mapping[int, tuple[float, float]] = MappingProxyType(
    {0: (0.0, 0.0), 1: (0.0, 0.0), 2: (0.0, 280e-6), 3: (280e-6, 500e-6)}
)
"""CPU time that DeepSpeed adds to each module with parameters, in a forward and in a backward pass, by ZeRO stage.
Source: Qwen3-0.6B on an H200, deepspeed 0.19.8, 310 modules, one rank: steps of 0.18 s under ZeRO-2 and 0.36 s under
ZeRO-3, without an engine 0.09 s; ZeRO-2 launches 19 kernels for each gradient, most to look for numbers that are not
finite. More ranks make it no less."""

INTRA_RATIO = 0.78
"""Bus bandwidth of collectives over the link's peak. Source: nccl-tests#326: 360 of 450 GB/s with NVLink 4 is what
NVIDIA expects; nccl-tests#149 and NCCL's own tables: 200 to 235 of 300 with NVLink 3."""

PCIE_LINK_RATIO = 0.65
"""The same where GPUs of a node have no link but PCIe: messages cross the host bridge. Source: nccl-tests#178: 20 GB/s
of 31.5 as soon as a ring of A100 leaves NVLink."""
HOST_COPY_RATIO = 0.32
"""The same where the driver lets no GPU reach another one's memory: each message is written to host RAM and read from
there. Source: NCCL counts 10 GB/s between the sockets of such a machine, of 31.5 (its graph in nccl-tests#307, eight
RTX 4090; src/graph/topo.h: QPI); nccl-tests#74: 19 to 21 GB/s, both directions together, between A40 with peer access
off; nccl#1639: 28 of 63 on eight tuned RTX 5090."""

INTER_RATIO = 0.85
"""Bus bandwidth between nodes over the adapters' line rate. Source: nccl-tests#290: 46 to 48 of 50 GB/s at best;
nccl-tests#119: 85 of 100 GB/s on average."""

OVERLAP_SLOWDOWN = 0.189
"""Share of a hidden collective's time by which it slows the computation that hides it: it takes multiprocessors and
memory bandwidth. Source: arXiv 2507.03114, the average over A100, H100, MI210 and MI250."""

RETRY_S = 0.5
"""Time of giving all cached memory back to the driver, for which the CPU waits until the GPU has nothing to do, and of
asking for it again. Source: pytorch#104509: FSDP on 16 A100 whose allocator retries takes 7.3 s a step in place of
5.3; how many of its 46 retries are of one step is not said."""

PCIE_RATIO = 0.80
"""Bandwidth of pinned copies over the link's peak. Source: CUDA bandwidthTest, 25 of 31.5 GB/s, from memory."""
PAGEABLE_RATIO = 0.25
"""Share of that which pageable memory reaches; it cannot be hidden. Source: DeepSpeed#5301: pinned copies of offloaded
states are 4 to 6 times as fast."""

CPU_ADAM_BYTES_PER_S = 48e9
"""DRAM traffic of DeepSpeed's CPU Adam, all ranks of a node together, not bound to cores. Source: DeepSpeed's ZenFlow
blog: more than 4 s for Llama-2-7B; its tutorial on ZeRO-Offload: 0.7 s saved by binding, of 3.1 s for Qwen2.5-3B."""
CPU_ADAM_BYTES_PER_PARAM = 29.0
"""Its traffic for each parameter: master copy and moments read and written, gradient read, bf16 copy written."""

NVME_READ_BYTES_PER_S = 3.5e9
"""Reads of one drive. Source: DeepSpeed's ds_nvme_tune on a workstation: 3.7 GB/s."""
NVME_WRITE_BYTES_PER_S = 3.0e9
"""Writes of one drive. Source: the same: 3.2 GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Efficiency:
    """The rates of one cluster: data sheet × prior, or as measured. Compared by identity."""

    gemm_ratio: float
    """Large matrix products over peak FLOP/s."""
    attention_ratio: float
    """Attention over peak FLOP/s."""
    hbm_bytes_per_s: float
    """Elementwise kernels."""
    launch_s: float
    """One kernel launch."""
    intra_bus_bytes_per_s: float
    """Collectives inside a node."""
    inter_bus_bytes_per_s: float
    """Collectives between nodes, for each GPU of a node that takes part."""
    overlap_slowdown: float
    """Share of a hidden collective's time that shows."""
    pcie_bytes_per_s: float
    """Copies between one GPU and its host."""
    cpu_adam_bytes_per_s: float
    """CPU Adam of one node."""
    nvme_read_bytes_per_s: float
    """Reads of one node's drives."""
    nvme_write_bytes_per_s: float
    """Writes of one node's drives."""
    cache_bytes: int
    """Level-2 cache that one kernel can leave to the next."""
    is_ethernet: bool
    """Whether nodes are joined by Ethernet without RDMA."""
    calibrated: frozenset[str]
    """Fields of the calibration that replace a prior here and are known better."""


def efficiency(cluster: Cluster, measured: Measured = NOTHING) -> Efficiency:
    """Returns the rates that a cluster reaches: measured, else data sheet × prior."""
    return _efficiency(cluster.gpu, cluster.intra_link, cluster.inter_link, cluster.gpus_per_node, measured)


@lru_cache(maxsize=32)
def _efficiency(gpu: Gpu, intra: Link, inter: Link, gpus_per_node: int, measured: Measured) -> Efficiency:
    intra_ratio = INTRA_RATIO
    if intra.name.startswith("pcie"):
        intra_ratio = PCIE_LINK_RATIO if gpu.has_peer_access else HOST_COPY_RATIO
    inter_prior = INTER_RATIO * inter.bytes_per_s
    if measured.inter_bus_bytes_per_s is not None:
        inter_prior = measured.inter_bus_bytes_per_s / gpus_per_node
    return Efficiency(
        gemm_ratio=measured.gemm_ratio or gpu.gemm_ratio,
        attention_ratio=measured.attention_ratio or gpu.attention_ratio,
        hbm_bytes_per_s=(measured.hbm_ratio or HBM_RATIO) * gpu.hbm_bytes_per_s,
        launch_s=measured.launch_s or LAUNCH_S,
        intra_bus_bytes_per_s=measured.intra_bus_bytes_per_s or intra_ratio * intra.bytes_per_s,
        inter_bus_bytes_per_s=inter_prior,
        overlap_slowdown=measured.overlap_slowdown_ratio or OVERLAP_SLOWDOWN,
        pcie_bytes_per_s=measured.pcie_bytes_per_s or PCIE_RATIO * LINKS[gpu.host_link].bytes_per_s,
        cpu_adam_bytes_per_s=measured.cpu_adam_bytes_per_s or CPU_ADAM_BYTES_PER_S,
        nvme_read_bytes_per_s=measured.nvme_read_bytes_per_s or NVME_READ_BYTES_PER_S,
        nvme_write_bytes_per_s=measured.nvme_write_bytes_per_s or NVME_WRITE_BYTES_PER_S,
        cache_bytes=gpu.cache_mib * MIB,
        is_ethernet=inter.name.startswith("eth"),
        calibrated=frozenset(name for name in Measured.__slots__ if getattr(measured, name) is not None)
        - {"uncertain", *measured.uncertain},
    )
