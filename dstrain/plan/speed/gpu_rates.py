"""What GPUs reach of their data sheets in training, and their caches; each row with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """Sustained speed of kernels on some GPUs, over the data sheet's dense peak in bf16, and their cache."""

    gpus: tuple[str, ...]
    """Names in the table of GPUs."""
    gemm: float
    """Large matrix products in training."""
    attention: float
    """Attention without a mask, forward and backward together, on long causal sequences with heads of 128."""
    cache_mib: int
    """Level-2 cache of which one kernel's output is read by the next, in MiB; half of it where the chip has two halves
    that both hold what their multiprocessors read."""
    source: str
    """The source of the figures."""


_MAMF = "stas00/ml-engineering compute/accelerator, maximum achievable matmul FLOPS"
_MATMUL = "zzc0721/torch-performance-test-data database.md"
_FLASH = "FlashAttention-2 (arXiv 2307.08691), figures 5 and 6, from memory"
_SAME_KERNEL = "attention as large a share of products as on the A100, whose kernel it runs"

RATES = (
    GpuRates(
        gpus=("a100-80g", "a100-40g", "a800-80g", "a800-40g"),
        gemm=0.74,
        attention=0.58,
        cache_mib=20,
        source=f"{_MATMUL}: 265 of 312; in training about 230 (published runs of MPT and Mistral on 80 GB);"
        f" {_FLASH}: 180 at 8k; A100 whitepaper: 40 MB in two partitions",
    ),
    GpuRates(gpus=("a30",), gemm=0.65, attention=0.50, cache_mib=12, source="165 W hold the clock less; from memory"),
    GpuRates(
        gpus=("a100-80g-pcie", "a100-40g-pcie", "a800-80g-pcie"),
        gemm=0.64,
        attention=0.50,
        cache_mib=20,
        source=f"{_MATMUL}#108: 215 to 234 of 312, the rest as on the SXM card",
    ),
    GpuRates(
        gpus=("h100-sxm", "h800", "h200", "gh200"),
        gemm=0.56,
        attention=0.30,
        cache_mib=25,
        source=f"{_MATMUL}: 787 of 989 for a moment; in training about 550, the clock falls at 700 W (published runs of"
        f" MPT on 128 and more); {_FLASH}: 335 at 16k, the forward pass alone 370; triton#2459; H100 whitepaper: 50 MB"
        " in two partitions",
    ),
    GpuRates(
        gpus=("h100-pcie", "h100-nvl", "h800-pcie", "h200-nvl"),
        gemm=0.52,
        attention=0.28,
        cache_mib=25,
        source="350 to 600 W hold the clock less than the SXM card's 700; from memory",
    ),
    GpuRates(
        gpus=("h20", "h20-141g"),
        gemm=0.90,
        attention=0.70,
        cache_mib=30,
        source=f"{_MATMUL}: 142 of 148; far below its power limit",
    ),
    GpuRates(
        gpus=("b200", "b300"),
        gemm=0.53,
        attention=0.30,
        cache_mib=63,
        source=f"{_MATMUL}: 1696 of 2250, {_MAMF}: 1745; the rest as on the H100; attention and cache from memory",
    ),
    GpuRates(
        gpus=("rtx-4090", "rtx-4090-d"),
        gemm=0.95,
        attention=0.68,
        cache_mib=72,
        source=f"{_MATMUL}: 160 to 173 of 165.2, the D 146 to 151 of 147: 450 W hold more than the data sheet's clock;"
        f" torchtune's LoRA on one comes to 139 with all that it does; {_SAME_KERNEL}; Ada whitepaper: 72 MB",
    ),
    GpuRates(
        gpus=("l20",), gemm=0.92, attention=0.66, cache_mib=96, source=f"{_MATMUL}#107: 114 of 119.5; {_SAME_KERNEL}"
    ),
    GpuRates(
        gpus=("rtx-6000-ada", "l40", "l40s"),
        gemm=0.70,
        attention=0.51,
        cache_mib=96,
        source=f"{_MATMUL}: 269 of 362 on an L40S, whose 350 W do not hold the clock; {_SAME_KERNEL}; Ada whitepaper",
    ),
    GpuRates(
        gpus=("l4",),
        gemm=0.47,
        attention=0.38,
        cache_mib=48,
        source=f"{_MATMUL}#120: 57 to 59 of 121 in large products, at 72 W; {_SAME_KERNEL}; Ada whitepaper",
    ),
    GpuRates(
        gpus=("t4",),
        gemm=0.50,
        attention=0.20,
        cache_mib=4,
        source=f"{_MATMUL}: 42 of 65 for a moment, 70 W halve the clock; no flash attention, from memory",
    ),
    GpuRates(
        gpus=("rtx-3090",),
        gemm=0.97,
        attention=0.70,
        cache_mib=6,
        source=f"{_MATMUL}: 76 to 77 of 71, as the clock is above the data sheet's; {_SAME_KERNEL}; GA102 whitepaper",
    ),
    GpuRates(
        gpus=("rtx-a6000", "a40"),
        gemm=0.76,
        attention=0.56,
        cache_mib=6,
        source=f"{_MATMUL}: 123 of 154.8, #185: 111 to 122 of 149.7; {_SAME_KERNEL}; GA102 whitepaper",
    ),
    GpuRates(
        gpus=("a10g",),
        gemm=0.93,
        attention=0.66,
        cache_mib=6,
        source=f"{_MATMUL}#126: 67 to 69 of 70; {_SAME_KERNEL}; GA102 whitepaper",
    ),
    GpuRates(gpus=("a10",), gemm=0.60, attention=0.45, cache_mib=6, source="150 W do not hold the clock; from memory"),
    GpuRates(
        gpus=("rtx-5090",),
        gemm=0.98,
        attention=0.75,
        cache_mib=96,
        source=f"{_MATMUL}: 235 to 242 of 209.5, as the clock is above the data sheet's; {_SAME_KERNEL}; RTX Blackwell"
        " whitepaper: 96 MB",
    ),
    GpuRates(
        gpus=("rtx-pro-6000",),
        gemm=0.79,
        attention=0.58,
        cache_mib=128,
        source=f"{_MATMUL}: 409 to 418 of 503.8; {_SAME_KERNEL}; RTX Blackwell PRO whitepaper: 128 MB",
    ),
    GpuRates(
        gpus=("v100-32g", "v100-16g", "v100-32g-pcie", "v100-16g-pcie"),
        gemm=0.70,
        attention=0.30,
        cache_mib=6,
        source=f"{_MATMUL}: 89 to 97 of 125; no flash attention, from memory; V100 whitepaper: 6 MB",
    ),
    GpuRates(
        gpus=("mi300x",),
        gemm=0.42,
        attention=0.20,
        cache_mib=0,
        source=f"{_MAMF}: 668 of 1307, the rest as on the H100; attention from memory; its cache is not counted",
    ),
)
"""One row for GPUs of one make. A product in training reaches 0.96 of what is measured of large ones alone where the
power limit leaves the clock as it is (torchtune's rows on the RTX 4090), less where it does not."""

_BY_GPU: Mapping[str, GpuRates] = MappingProxyType({name: row for row in RATES for name in row.gpus})
_UNKNOWN = GpuRates(gpus=(), gemm=0.60, attention=0.40, cache_mib=0, source="the middle of the table")


def rates_of(name: str) -> GpuRates:
    """Returns the row of a GPU, or that in the middle of the table for any other."""
    return _BY_GPU.get(name, _UNKNOWN)


def cache_bytes(name: str) -> int:
    """Returns the bytes of level-2 cache that one kernel can leave to the next.

    >>> cache_bytes("rtx-4090") // 2**20, cache_bytes("something else")
    (72, 0)
    """
    return rates_of(name).cache_mib * MIB
