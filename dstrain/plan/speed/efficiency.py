"""Priors of the step time: what hardware reaches of its data sheet, each with its source.

A calibration of the same GPU replaces the priors that it measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from dstrain.facts.cluster.calibration import NOTHING, Measured
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.cluster.links import LINKS, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Sustained speed of kernels on some GPUs, over the data sheet's dense peak in bf16."""

    gpus: tuple[str, ...]
    """Names in the table of GPUs."""
    gemm: float
    """Large matrix products."""
    attention: float
    """Attention without a mask, forward and backward together, on long causal sequences with heads of 128."""
    source: str
    """The source of the figures."""


_MAMF = "stas00/ml-engineering compute/accelerator, maximum achievable matmul FLOPS"
_FLASH = "FlashAttention-2 (arXiv 2307.08691), figures 5 and 6, from memory"

KERNELS = (
    Kernels(
        gpus=("a100-80g", "a100-40g", "a800-80g", "a800-40g", "a30"),
        gemm=0.74,
        attention=0.58,
        source=f"{_MAMF}: 271 of 312, in training about 230 (published runs of MPT, Mistral); {_FLASH}: 180 at 8k",
    ),
    Kernels(
        gpus=("a100-80g-pcie", "a100-40g-pcie", "a800-80g-pcie"),
        gemm=0.68,
        attention=0.53,
        source=f"{_MAMF}: 253 of 312, the rest as on the SXM card",
    ),
    Kernels(
        gpus=("h100-sxm", "h800", "h200", "gh200"),
        gemm=0.56,
        attention=0.30,
        source=f"{_MAMF}: 794 of 989, in training about 550, the clock falls at 700 W (published runs of MPT, Llama 3);"
        f" {_FLASH}: 335 at 16k, the forward pass alone 370; triton#2459",
    ),
    Kernels(
        gpus=("h100-pcie", "h100-nvl", "h800-pcie", "h200-nvl"),
        gemm=0.52,
        attention=0.28,
        source="350 to 600 W hold the clock less than the SXM card's 700; from memory",
    ),
    Kernels(
        gpus=("h20", "h20-141g"),
        gemm=0.90,
        attention=0.70,
        source="142 of 148 measured in zzc0721/torch-performance-test-data#77; far below its power limit",
    ),
    Kernels(
        gpus=("b200", "b300"),
        gemm=0.56,
        attention=0.30,
        source=f"{_MAMF}: 1745 of 2250, the rest as on the H100; attention from memory",
    ),
    Kernels(
        gpus=("rtx-4090", "rtx-4090-d", "l20"),
        gemm=0.85,
        attention=0.60,
        source="cuBLAS reaches 105 to 115 of 119.5 on an L20 (CUDA-Learn-Notes, hgemm); attention from memory",
    ),
    Kernels(
        gpus=("rtx-6000-ada", "l40", "l40s"),
        gemm=0.60,
        attention=0.45,
        source="300 to 350 W do not hold the clock at full rate; from memory",
    ),
    Kernels(gpus=("l4",), gemm=0.50, attention=0.40, source="72 W halve the clock; from memory"),
    Kernels(gpus=("t4",), gemm=0.50, attention=0.20, source="70 W halve the clock; no flash attention; from memory"),
    Kernels(
        gpus=("rtx-3090", "rtx-a6000", "a40", "a10g"),
        gemm=0.80,
        attention=0.55,
        source="cuBLAS with fp32 accumulation; from memory",
    ),
    Kernels(gpus=("a10",), gemm=0.60, attention=0.45, source="150 W do not hold the clock; from memory"),
    Kernels(
        gpus=("rtx-5090", "rtx-pro-6000"),
        gemm=0.80,
        attention=0.50,
        source="as the Ada cards below their power limit; from memory",
    ),
    Kernels(
        gpus=("v100-32g", "v100-16g", "v100-32g-pcie", "v100-16g-pcie"),
        gemm=0.70,
        attention=0.30,
        source="cuBLAS about 90 of 125; no flash attention; from memory",
    ),
    Kernels(
        gpus=("mi300x",),
        gemm=0.42,
        attention=0.20,
        source=f"{_MAMF}: 668 of 1307, the rest as on the H100; attention from memory",
    ),
)
"""One row for GPUs of one make."""

_BY_GPU: Mapping[str, Kernels] = MappingProxyType({name: row for row in KERNELS for name in row.gpus})
_UNKNOWN = Kernels(gpus=(), gemm=0.60, attention=0.40, source="the middle of the table")

HALF_WAVE = 1_000_000.0
"""Results that half of a GPU's multiprocessors compute at once, which the last, partly filled wave of tiles of a matrix
product wastes on average: 120 × 128 × 128 / 2. Source: NVIDIA, Matrix Multiplication Background User's Guide, wave
quantization."""

HALF_TILE = 64.0
"""Rows of an expert that the last tile of 128 wastes. Source: the same guide, tile quantization."""

GROUPED_RATIO = 0.80
"""Speed of one grouped matrix product over all experts, over that of a dense one. Source: from memory; NeMo AutoModel
publishes 277 TFLOP/s for Qwen3-30B-A3B where dense models reach 390."""

SHORT_SEQUENCE = 700.0
"""Sequence length at which attention reaches half of its speed: s / (s + 700). Source: triton#1917 (A100) and
triton#2459 (H100), TFLOP/s of causal attention at 1k to 16k."""

MASKED_ATTENTION_RATIO = 0.4
"""Speed of PyTorch's memory-efficient attention, which takes a padding mask, over that of flash attention, which does
not. Source: flash-attention#416 (0.3), NVIDIA/TileGym#49 (0.43)."""

HBM_RATIO = 0.85
"""Bandwidth of elementwise kernels over the data sheet's. Source: from memory; a copy on an A100 reaches 1.75 TB/s."""

LAUNCH_S = 12e-6
"""CPU time of one kernel in eager PyTorch, Python and autograd included, forward and backward on average. Source: 11 µs
measured for Transformers 5.23's Llama layers on tensors too small to count (one core of an AMD EPYC, torch 2.13);
published fine-tuning of litgpt on short samples comes to about 20."""

HOOK_S: Mapping[int, tuple[float, float]] = MappingProxyType(
    {0: (0.0, 0.0), 1: (0.0, 0.0), 2: (0.0, 40e-6), 3: (200e-6, 180e-6)}
)
"""CPU time that DeepSpeed adds to each module with parameters, in a forward and in a backward pass, by ZeRO stage.
Source: measured as LAUNCH_S, deepspeed 0.19.8, 147 modules, one rank; more ranks make it no less."""

UNIT_S = (1.3e-3, 2.2e-3)
"""CPU time that PyTorch's full sharding adds to each unit, a layer or one matrix of an adapter, in a forward and in a
backward pass. Source: two gloo ranks take 3.5 and 6.1 ms, gloo's own messages included (torch 2.13, one core each); on
GPUs, LoRA runs that wait for the CPU (PowerLM-3b, 361 units, and Mixtral, 289) take 4.5 to 5 ms over three passes."""

INTRA_RATIO = 0.78
"""Bus bandwidth of collectives over the link's peak. Source: nccl-tests#326: 360 of 450 GB/s with NVLink 4 is what
NVIDIA expects; nccl-tests#149 and NCCL's own tables: 200 to 235 of 300 with NVLink 3."""

PCIE_LINK_RATIO = 0.65
"""The same where GPUs of a node have no link but PCIe: messages cross the host bridge. Source: from memory."""

INTER_RATIO = 0.85
"""Bus bandwidth between nodes over the adapters' line rate. Source: nccl-tests#290: 46 to 48 of 50 GB/s at best;
nccl-tests#119: 85 of 100 GB/s on average."""

LATENCY_S = 20e-6
"""Time of the smallest collective inside a node. Source: nccl-tests on eight A100, from memory."""
NODE_LATENCY_S = 5e-6
"""Added by each further node of a ring. Source: InfiniBand and NCCL's proxy, from memory."""
HOP_LATENCY_S = 0.6e-6
"""Added by each further GPU of a ring. Source: NVLink with the low-latency protocol, from memory."""

OVERLAP_SLOWDOWN = 0.189
"""Share of a hidden collective's time by which it slows the computation that hides it: it takes multiprocessors and
memory bandwidth. Source: arXiv 2507.03114, the average over A100, H100, MI210 and MI250."""

PCIE_RATIO = 0.80
"""Bandwidth of pinned copies over the link's peak. Source: CUDA bandwidthTest, 25 of 31.5 GB/s, from memory."""
PAGEABLE_RATIO = 0.25
"""What pageable memory leaves of that, and it cannot be hidden. Source: DeepSpeed#5301: pinned copies of offloaded
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
    is_ethernet: bool
    """Whether nodes are joined by Ethernet without RDMA."""
    calibrated: frozenset[str]
    """Fields of the calibration that replace a prior here."""


def efficiency(cluster: Cluster, measured: Measured = NOTHING) -> Efficiency:
    """Returns the rates that a cluster reaches: measured, else data sheet × prior."""
    return _efficiency(cluster.gpu, cluster.intra_link, cluster.inter_link, cluster.gpus_per_node, measured)


@lru_cache(maxsize=32)
def _efficiency(gpu: Gpu, intra: Link, inter: Link, gpus_per_node: int, measured: Measured) -> Efficiency:
    kernels = _BY_GPU.get(gpu.name, _UNKNOWN)
    intra_ratio = PCIE_LINK_RATIO if intra.name.startswith("pcie") else INTRA_RATIO
    inter_prior = INTER_RATIO * inter.bytes_per_s
    if measured.inter_bus_bytes_per_s is not None:
        inter_prior = measured.inter_bus_bytes_per_s / gpus_per_node
    return Efficiency(
        gemm_ratio=measured.gemm_ratio or kernels.gemm,
        attention_ratio=measured.attention_ratio or kernels.attention,
        hbm_bytes_per_s=(measured.hbm_ratio or HBM_RATIO) * gpu.hbm_bytes_per_s,
        launch_s=measured.launch_s or LAUNCH_S,
        intra_bus_bytes_per_s=measured.intra_bus_bytes_per_s or intra_ratio * intra.bytes_per_s,
        inter_bus_bytes_per_s=inter_prior,
        overlap_slowdown=measured.overlap_slowdown_ratio or OVERLAP_SLOWDOWN,
        pcie_bytes_per_s=measured.pcie_bytes_per_s or PCIE_RATIO * host_link(gpu).bytes_per_s,
        cpu_adam_bytes_per_s=measured.cpu_adam_bytes_per_s or CPU_ADAM_BYTES_PER_S,
        nvme_read_bytes_per_s=measured.nvme_read_bytes_per_s or NVME_READ_BYTES_PER_S,
        nvme_write_bytes_per_s=measured.nvme_write_bytes_per_s or NVME_WRITE_BYTES_PER_S,
        is_ethernet=inter.name.startswith("eth"),
        calibrated=frozenset(name for name in Measured.__slots__ if getattr(measured, name) is not None),
    )


_HOST_LINKS: Mapping[tuple[int, int], str] = MappingProxyType(
    {(7, 0): "pcie3", (7, 5): "pcie3", (8, 0): "pcie4", (8, 6): "pcie4", (8, 9): "pcie4"}
)


def host_link(gpu: Gpu) -> Link:
    """Returns the link between a GPU and its host: PCIe of its generation; Grace Hopper's own goes by NVLink.

    Source: data sheets: V100 and T4 PCIe 3, Ampere and Ada PCIe 4, Hopper, Blackwell and MI300X PCIe 5.
    """
    if gpu.link.startswith("pcie") or gpu.link == "loopback":
        return LINKS[gpu.link]
    return LINKS["nvlink4" if gpu.name == "gh200" else _HOST_LINKS.get(gpu.compute_capability, "pcie5")]
