"""The table of GPUs: memory as nvidia-smi shows it, dense FLOP/s, memory bandwidth, links; each row has its source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dstrain.errors import InvalidConfig, nearest

CPU = "cpu"
"""Name of the row for machines without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    """Its short name, such as `h100-sxm`."""
    aliases: tuple[str, ...]
    """Other names that `--gpu` takes, and the names that NVML reports; case, dashes, spaces and makers do not count."""
    memory_mib: int
    """Total memory in MiB, as nvidia-smi shows it; 0 for `cpu`, where a cluster fills in each rank's share of the RAM."""
    bf16_flops_per_s: float
    """Dense bf16 tensor-core FLOP/s; 0 if the GPU has no bf16."""
    fp16_flops_per_s: float
    """Dense fp16 tensor-core FLOP/s with fp32 accumulation."""
    fp32_flops_per_s: float
    """FLOP/s of fp32 without TF32, which is how PyTorch multiplies fp32 matrices by default."""
    hbm_bytes_per_s: float
    """Memory bandwidth."""
    link: str
    """The link between GPUs of one node, a name in `links`."""
    compute_capability: tuple[int, int]
    """CUDA compute capability; (0, 0) if it is not from NVIDIA."""
    has_flash_attention_2: bool
    """Whether FlashAttention-2 runs on it (compute capability 8.0 and up, and MI300X)."""
    has_peer_access: bool
    """Whether GPUs of one node reach each other's memory over PCIe, which the driver denies GeForce cards."""
    source: str
    """Source of the figures."""

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return self.memory_mib * 2**20

    @property
    def is_cpu(self) -> bool:
        """Whether the row stands for a CPU, whose figures come from no data sheet."""
        return self.name == CPU

    @property
    def is_listed(self) -> bool:
        """Whether it is a row of the table; the speed of any other GPU is a guess from its cores and clocks."""
        return self.source != _NVML

    @property
    def has_grouped_products(self) -> bool:
        """Whether PyTorch multiplies the rows of all experts in one kernel, from 2.9 on; elsewhere Transformers loops.

        Source: Transformers 5.23 integrations/moe.py: _can_use_grouped_mm (compute capability 8.0 and up, ROCm, CPU).
        """
        return self.is_cpu or self.has_flash_attention_2

    @property
    def has_bf16(self) -> bool:
        """Whether matrix products run in bf16."""
        return self.bf16_flops_per_s > 0


_NVML = "NVML"
"""The source of a GPU that is not in the table."""
_SMI = "memory as nvidia-smi prints it"
_AMPERE = "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_GA102 = "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_ADA_PRO = "https://images.nvidia.com/aem-dam/en-zz/Solutions/technologies/NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_HGX = "https://www.nvidia.com/en-us/data-center/hgx/"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_BLACKWELL_PRO = "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_CHINA = "no public data sheet; figures as widely reported"


_WITHOUT_PEER_ACCESS = ("rtx-3090", "rtx-4090", "rtx-4090-d", "rtx-5090")
"""Source: nccl#1127 (3090 over PCIe), accelerate#2328 (4090); tinygrad/open-gpu-kernel-modules patches the driver to
allow it on a 4090."""


def _row(  # a table entry: the columns that differ in every row by name, the aliases at the end
    name: str,
    *aliases: str,
    mib: int,
    bf16: float,
    fp16: float,
    fp32: float,
    hbm: float,
    link: str,
    cc: tuple[int, int],
    source: str,
) -> Gpu:
    """Returns the Gpu of one row; FLOP/s come in TFLOP/s and the bandwidth in GB/s, as data sheets have them."""
    return Gpu(
        name=name,
        aliases=aliases,
        memory_mib=mib,
        bf16_flops_per_s=bf16 * 1e12,
        fp16_flops_per_s=fp16 * 1e12,
        fp32_flops_per_s=fp32 * 1e12,
        hbm_bytes_per_s=hbm * 1e9,
        link=link,
        compute_capability=cc,
        has_flash_attention_2=cc >= (8, 0) or name == "mi300x",
        has_peer_access=name not in _WITHOUT_PEER_ACCESS,
        source=source,
    )


# fmt: off
_ROWS = (
    _row("a100-80g", "a100", "a100-80gb", "a100-sxm", "a100-sxm4-80gb", mib=81920, bf16=312, fp16=312, fp32=19.5, hbm=2039, link="nvlink3", cc=(8, 0), source=f"{_A100}; {_SMI}"),
    _row("a100-40g", "a100-40gb", "a100-sxm4-40gb", mib=40960, bf16=312, fp16=312, fp32=19.5, hbm=1555, link="nvlink3", cc=(8, 0), source=f"{_AMPERE}; {_SMI}"),
    _row("a100-80g-pcie", "a100-pcie", "a100-80gb-pcie", "a100-pcie-80gb", mib=81920, bf16=312, fp16=312, fp32=19.5, hbm=1935, link="pcie4", cc=(8, 0), source=f"{_A100}; {_SMI}"),
    _row("a100-40g-pcie", "a100-40gb-pcie", "a100-pcie-40gb", mib=40960, bf16=312, fp16=312, fp32=19.5, hbm=1555, link="pcie4", cc=(8, 0), source=f"{_AMPERE}; memory from the data sheet"),
    _row("a800-80g", "a800", "a800-80gb", "a800-sxm4-80gb", mib=81920, bf16=312, fp16=312, fp32=19.5, hbm=2039, link="nvlink3-a800", cc=(8, 0), source=f"{_A100} (an A100 with less NVLink); {_SMI}"),
    _row("a800-40g", "a800-40gb", "a800-sxm4-40gb", mib=40960, bf16=312, fp16=312, fp32=19.5, hbm=1555, link="nvlink3-a800", cc=(8, 0), source=f"{_A100} (an A100 with less NVLink); {_SMI}"),
    _row("a800-80g-pcie", "a800-pcie", "a800-80gb-pcie", mib=81920, bf16=312, fp16=312, fp32=19.5, hbm=1935, link="pcie4", cc=(8, 0), source=f"{_A100} (an A100 with less NVLink); {_SMI}"),
    _row("h100-sxm", "h100", "h100-80g", "h100-80gb", "h100-sxm5", "h100-80gb-hbm3", mib=81559, bf16=989.4, fp16=989.4, fp32=66.9, hbm=3350, link="nvlink4", cc=(9, 0), source=f"{_H100}, {_HOPPER}; {_SMI}"),
    _row("h100-pcie", mib=81559, bf16=756, fp16=756, fp32=51.2, hbm=2000, link="pcie5", cc=(9, 0), source=f"{_HOPPER}; {_SMI}"),
    _row("h100-nvl", mib=95830, bf16=835.5, fp16=835.5, fp32=60, hbm=3900, link="pcie5", cc=(9, 0), source=f"{_H100} (1671 sparse; NVLink joins pairs only, so a ring runs on PCIe); {_SMI}"),
    _row("h800", "h800-80g", "h800-80gb", "h800-sxm", mib=81559, bf16=989.4, fp16=989.4, fp32=66.9, hbm=3350, link="nvlink4-h800", cc=(9, 0), source=f"{_H100} (an H100 with less NVLink); {_SMI}"),
    _row("h800-pcie", mib=81559, bf16=756, fp16=756, fp32=51.2, hbm=2000, link="pcie5", cc=(9, 0), source=f"{_HOPPER} (as the H100 PCIe); {_SMI}"),
    _row("h20", "h20-96g", "h20-96gb", "h20-sxm", mib=97871, bf16=148, fp16=148, fp32=44, hbm=4000, link="nvlink4", cc=(9, 0), source=f"{_CHINA}, 142 TFLOP/s measured in https://github.com/zzc0721/torch-performance-test-data/issues/77; {_SMI}"),
    _row("h20-141g", "h20-141gb", "h20-3e", mib=143771, bf16=148, fp16=148, fp32=44, hbm=4800, link="nvlink4", cc=(9, 0), source=f"{_CHINA} (an H20 with the H200's memory); {_SMI}"),
    _row("h200", "h200-sxm", "h200-141g", "h200-141gb", mib=143771, bf16=989.4, fp16=989.4, fp32=66.9, hbm=4800, link="nvlink4", cc=(9, 0), source=f"{_H200}; {_SMI}"),
    _row("h200-nvl", mib=143771, bf16=835.5, fp16=835.5, fp32=60, hbm=4800, link="pcie5", cc=(9, 0), source=f"{_H200} (NVLink joins two or four only, so a ring runs on PCIe); {_SMI}"),
    _row("gh200", "gh200-96g", "gh200-480gb", "gh200-120gb", mib=97871, bf16=989.4, fp16=989.4, fp32=66.9, hbm=4000, link="nvlink4", cc=(9, 0), source=f"https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip; {_SMI}"),
    _row("b200", "b200-sxm", "b200-180g", mib=183359, bf16=2250, fp16=2250, fp32=75, hbm=7700, link="nvlink5", cc=(10, 0), source=f"{_HGX}; bandwidth from bus width × clock in https://github.com/pytorch/ao/pull/4002; {_SMI}"),
    _row("b300", "b300-sxm", "b300-sxm6-ac", mib=275040, bf16=2250, fp16=2250, fp32=75, hbm=8000, link="nvlink5", cc=(10, 3), source=f"{_HGX}; {_SMI}"),
    _row("a10", mib=23028, bf16=125, fp16=125, fp32=31.2, hbm=600, link="pcie4", cc=(8, 6), source=f"https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf; {_SMI}"),
    _row("a10g", mib=23028, bf16=70, fp16=70, fp32=31.5, hbm=600, link="pcie4", cc=(8, 6), source=f"https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf; {_SMI}"),
    _row("a30", mib=24576, bf16=165, fp16=165, fp32=10.3, hbm=933, link="pcie4", cc=(8, 0), source=f"https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf; {_SMI}"),
    _row("a40", mib=46068, bf16=149.7, fp16=149.7, fp32=37.4, hbm=696, link="pcie4", cc=(8, 6), source=f"https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf; {_SMI}"),
    _row("l4", mib=23034, bf16=121, fp16=121, fp32=30.3, hbm=300, link="pcie4", cc=(8, 9), source=f"https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet (242 sparse); {_SMI}"),
    _row("l20", mib=46068, bf16=119.5, fp16=119.5, fp32=59.8, hbm=864, link="pcie4", cc=(8, 9), source=f"{_CHINA}; {_SMI}"),
    _row("l40", mib=46068, bf16=181.05, fp16=181.05, fp32=90.5, hbm=864, link="pcie4", cc=(8, 9), source=f"https://images.nvidia.com/content/Solutions/data-center/vgpu-L40-datasheet.pdf; {_SMI}"),
    _row("l40s", mib=46068, bf16=362.05, fp16=362.05, fp32=91.6, hbm=864, link="pcie4", cc=(8, 9), source=f"https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413; {_SMI}"),
    _row("rtx-3090", "3090", mib=24576, bf16=71, fp16=71, fp32=35.6, hbm=936, link="pcie4", cc=(8, 6), source=f"{_GA102}, appendix A: fp32 accumulation; {_SMI}"),
    _row("rtx-4090", "4090", mib=24564, bf16=165.2, fp16=165.2, fp32=82.6, hbm=1008, link="pcie4", cc=(8, 9), source=f"{_ADA}, appendix A: fp32 accumulation; {_SMI}"),
    _row("rtx-4090-d", "4090-d", mib=24564, bf16=147, fp16=147, fp32=73.5, hbm=1008, link="pcie4", cc=(8, 9), source=f"{_ADA}: the RTX 4090 × 14592/16384 cores; {_SMI}"),
    _row("rtx-5090", "5090", mib=32607, bf16=209.5, fp16=209.5, fp32=104.8, hbm=1792, link="pcie5", cc=(12, 0), source=f"{_BLACKWELL}, appendix A: fp32 accumulation; {_SMI}"),
    _row("rtx-a6000", "a6000", mib=49140, bf16=154.8, fp16=154.8, fp32=38.7, hbm=768, link="pcie4", cc=(8, 6), source=f"{_GA102}, appendix; {_SMI}"),
    _row("rtx-6000-ada", "6000-ada", "rtx-6000-ada-generation", mib=49140, bf16=364.2, fp16=364.2, fp32=91.1, hbm=960, link="pcie4", cc=(8, 9), source=f"{_ADA_PRO}; {_SMI}"),
    _row("rtx-pro-6000", "pro-6000", "rtx-pro-6000-blackwell-server-edition", "rtx-pro-6000-blackwell-workstation-edition", mib=97887, bf16=503.8, fp16=503.8, fp32=125, hbm=1597, link="pcie5", cc=(12, 0), source=f"{_BLACKWELL_PRO}; bandwidth of the Server Edition; {_SMI}"),
    _row("v100-32g", "v100", "v100-32gb", "v100-sxm2-32gb", "v100-sxm3-32gb", mib=32768, bf16=0, fp16=125, fp32=15.7, hbm=900, link="nvlink2", cc=(7, 0), source=f"{_VOLTA}; {_SMI} (32510 with drivers before 515)"),
    _row("v100-16g", "v100-16gb", "v100-sxm2-16gb", mib=16384, bf16=0, fp16=125, fp32=15.7, hbm=900, link="nvlink2", cc=(7, 0), source=f"{_VOLTA}; {_SMI} (16160 with drivers before 515)"),
    _row("v100-32g-pcie", "v100-pcie-32gb", mib=32768, bf16=0, fp16=112, fp32=14, hbm=900, link="pcie3", cc=(7, 0), source=f"{_VOLTA}; memory as the SXM2 card's"),
    _row("v100-16g-pcie", "v100-pcie", "v100-pcie-16gb", mib=16384, bf16=0, fp16=112, fp32=14, hbm=900, link="pcie3", cc=(7, 0), source=f"{_VOLTA}; memory as the SXM2 card's"),
    _row("t4", mib=15360, bf16=0, fp16=65, fp32=8.1, hbm=320, link="pcie3", cc=(7, 5), source=f"https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf; {_SMI} (15109 with drivers before 515)"),
    _row("mi300x", "mi300x-oam", mib=196592, bf16=1307.4, fp16=1307.4, fp32=163.4, hbm=5300, link="infinity-fabric", cc=(0, 0), source="https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf; memory as rocm-smi prints it"),
    _row(CPU, "none", "no-gpu", mib=0, bf16=0, fp16=0, fp32=0, hbm=0, link="loopback", cc=(0, 0), source="no GPU, for trying things out: no speed, so that no time is predicted; PyTorch's bf16 on most CPUs is slower than fp32, so it counts as having none"),
)
# fmt: on

GPUS: Mapping[str, Gpu] = MappingProxyType({row.name: row for row in _ROWS})
"""Every GPU by name."""
NAMES = tuple(name for row in _ROWS for name in (row.name, *row.aliases))
"""Every name that `gpu` takes."""

_MAKERS = ("nvidia", "amd", "tesla", "geforce", "instinct")


def _folded(name: str) -> str:
    """Returns the name without case, dashes, spaces and the makers' words: `Tesla V100-SXM2-32GB` is `v100sxm232gb`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _MAKERS)


_BY_FOLDED: Mapping[str, Gpu] = MappingProxyType(
    {_folded(name): row for row in _ROWS for name in (row.name, *row.aliases)}
)


def gpu(name: str) -> Gpu:
    """Returns the GPU of that name or alias; case, dashes, spaces and makers' words do not count.

    Raises InvalidConfig with the nearest name, or with all of them if none is near.

    >>> gpu("A100 80GB").name, gpu("NVIDIA H100").name, gpu("4090").memory_mib
    ('a100-80g', 'h100-sxm', 24564)
    """
    row = _BY_FOLDED.get(_folded(name))
    if row is not None:
        return row
    near = nearest(_folded(name), _BY_FOLDED)
    hint = f'Did you mean "{_BY_FOLDED[near].name}"?' if near else "Known: " + ", ".join(GPUS)
    raise InvalidConfig(f'--gpu: "{name}" is not a GPU that dstrain knows', hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The speed of a GPU as NVML reports it."""

    num_cores: int
    """CUDA cores of all SMs together."""
    sm_clock_mhz: int
    """Highest clock of the SMs."""
    memory_clock_mhz: int
    """Highest clock of the memory, which moves two bits per pin in each cycle."""
    memory_bus_bits: int
    """Width of the memory bus."""
    compute_capability: tuple[int, int]
    """CUDA compute capability."""


def from_nvml(name: str, memory_mib: int, chip: Chip | None = None) -> Gpu:
    """Returns the GPU that NVML calls `name`: its row with the measured memory (0: the table's), else a guess.

    Only a whole name counts: an `RTX 4090 Laptop GPU` is not the card that its name begins with. A GPU outside the
    table has no speed without `chip`.

    >>> from_nvml("NVIDIA A100-SXM4-80GB", 81920).name, from_nvml("Tesla V100-SXM2-32GB", 32510).memory_mib
    ('a100-80g', 32510)
    """
    row = _BY_FOLDED.get(_folded(name))
    return _unlisted(name, memory_mib, chip) if row is None else replace(row, memory_mib=memory_mib or row.memory_mib)


def is_called(reported: str, name: str) -> bool:
    """Returns whether `name` means the GPU that NVML reports.

    >>> is_called("NVIDIA GeForce RTX 5070", "rtx-5070"), is_called("NVIDIA GeForce RTX 5070", "rtx-5090")
    (True, False)
    """
    return _folded(reported) == _folded(name)


def _unlisted(name: str, memory_mib: int, chip: Chip | None) -> Gpu:
    """Returns a GPU that is not in the table; its speed follows from its cores and clocks.

    For each FLOP of its CUDA cores, its tensor cores do as many as those of the relative: the row of its own generation
    whose name is nearest. GPUs older than all rows have none that PyTorch trains on.
    """
    capability = chip.compute_capability if chip is not None else (0, 0)
    relative = _relative(name, capability)
    fp32 = 2e6 * chip.num_cores * chip.sm_clock_mhz if chip is not None else 0.0  # a multiply-add of a core is two
    half = fp32 * relative.fp16_flops_per_s / relative.fp32_flops_per_s if relative is not None else 0.0
    return Gpu(
        name=name,
        aliases=(),
        memory_mib=memory_mib,
        bf16_flops_per_s=half if capability >= (8, 0) else 0.0,
        fp16_flops_per_s=half,
        fp32_flops_per_s=fp32,
        hbm_bytes_per_s=2e6 * chip.memory_clock_mhz * chip.memory_bus_bits / 8 if chip is not None else 0.0,
        link=relative.link if relative is not None and relative.link.startswith("pcie") else "pcie4",
        compute_capability=capability,
        has_flash_attention_2=capability >= (8, 0),
        has_peer_access="geforce" not in name.lower(),
        source=_NVML,
    )


def _relative(name: str, capability: tuple[int, int]) -> Gpu | None:
    """Returns the row with the nearest name among those of this compute capability, or of the next lower one."""
    near = max((row.compute_capability for row in _ROWS if (0, 0) < row.compute_capability <= capability), default=None)
    rows = {folded: row for folded, row in _BY_FOLDED.items() if row.compute_capability == near}
    closest = difflib.get_close_matches(_folded(name), rows, n=1, cutoff=0)
    return rows[closest[0]] if closest else None
