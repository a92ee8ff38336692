"""The table of GPUs: memory as nvidia-smi shows it, multiprocessors, clock, dense FLOP/s, memory bandwidth, cache, links,
and what kernels reach of that; each row has its source."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """GPUs of one architecture on one kind of board."""

    cc: tuple[int, int]
    """CUDA compute capability; (0, 0) if they are not from NVIDIA."""
    half: int
    """FLOPs of a multiprocessor in a clock: dense products in half precision with sums in fp32."""
    fp32: int
    """The same of its CUDA cores, outside of TF32."""
    link: str
    """The link between GPUs of one node, a name in `links`."""
    gemm: float
    """Rate of large matrix products in training, over the data sheet's peak. A product in training reaches 0.96 of the
    rate of large ones alone if the power limit leaves the clock as it is (torchtune's rows on the RTX
    4090), less if it does not."""
    attention: float
    """The same of attention without a mask, forward and backward together, on long causal sequences with heads of 128."""
    host_link: str = "pcie5"
    """The link to the host, a name in `links`, unless GPUs are linked by PCIe themselves. Source: data sheets."""
    threads: int = 2048
    """Threads that a multiprocessor holds at most. Source: CUDA Programming Guide, technical specifications per compute
    capability."""
    has_peer_access: bool = True
    """Whether GPUs of one node reach each other's memory over PCIe, which the driver denies GeForce cards."""
    is_laptop: bool = False
    """Whether they are made for laptops."""
    source: str
    """Source of what kernels reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One GPU, as its data sheet has it."""

    make: Make
    names: tuple[str, ...]
    """Its short name, such as `h100-sxm`, and others that people type or NVML reports."""
    mib: int
    """Total memory as nvidia-smi shows it."""
    sms: int
    """Multiprocessors."""
    mhz: int
    """The boost clock."""
    half: float
    """Dense TFLOP/s in fp16, and in bf16 if the GPU has it."""
    fp32: float
    """TFLOP/s in fp32 without TF32."""
    gbs: float
    """Memory bandwidth in GB/s."""
    l2: int
    """Level-2 cache of which one kernel's output is read by the next, in MiB; half of it if the chip has two halves that
    both hold what their multiprocessors read; rounded down; 0: not counted."""
    link: str
    """The link between GPUs of one node."""
    source: str


_MAMF = "stas00/ml-engineering compute/accelerator, maximum achievable matmul FLOPS"
_MATMUL = "zzc0721/torch-performance-test-data database.md"
_FLASH = "FlashAttention-2 (arXiv 2307.08691), figures 5 and 6, from memory"
_SAME_KERNEL = "attention as large a share of products as on the A100, whose kernel it runs"
_LAPTOP = "of the clock of the largest power that a laptop may give it, which few hold; from memory"

_A100_SXM = Make(
    cc=(8, 0), half=2048, fp32=128, link="nvlink3", host_link="pcie4", gemm=0.74, attention=0.58,
    source=f"{_MATMUL}: 265 of 312; in training about 230 (published runs of MPT and Mistral on 80 GB);"
    f" {_FLASH}: 180 at 8k; A100 whitepaper: 40 MB in two partitions",
)  # fmt: skip
_A100_PCIE = replace(
    _A100_SXM, link="pcie4", gemm=0.64, attention=0.50,
    source=f"{_MATMUL}#108: 215 to 234 of 312, the rest as on the SXM card",
)  # fmt: skip
_A30 = replace(_A100_PCIE, gemm=0.65, attention=0.50, source="165 W hold the clock less; from memory")
_HOPPER_SXM = Make(
    cc=(9, 0), half=4096, fp32=256, link="nvlink4", gemm=0.56, attention=0.30,
    source=f"{_MATMUL}: 787 of 989 for a moment; in training about 550, the clock falls at 700 W (published runs of"
    f" MPT on 128 and more); {_FLASH}: 335 at 16k, the forward pass alone 370; triton#2459; H100 whitepaper: 50 MB"
    " in two partitions",
)  # fmt: skip
_GRACE_HOPPER = replace(_HOPPER_SXM, host_link="nvlink4")
_HOPPER_PCIE = replace(
    _HOPPER_SXM, link="pcie5", gemm=0.52, attention=0.28,
    source="350 to 600 W hold the clock less than the SXM card's 700; from memory",
)  # fmt: skip
_H20 = replace(
    _HOPPER_SXM, half=1024, gemm=0.90, attention=0.70, source=f"{_MATMUL}: 142 of 148; far below its power limit"
)
_B200 = Make(
    cc=(10, 0), half=8192, fp32=256, link="nvlink5", gemm=0.53, attention=0.30,
    source=f"{_MATMUL}: 1696 of 2250, {_MAMF}: 1745; the rest as on the H100; attention and cache from memory",
)  # fmt: skip
_B300 = replace(_B200, cc=(10, 3))
_RTX_40 = Make(
    cc=(8, 9), half=512, fp32=256, link="pcie4", host_link="pcie4", threads=1536, gemm=0.95, attention=0.68, has_peer_access=False,
    source=f"{_MATMUL}: 160 to 173 of 165.2 on an RTX 4090, the D 146 to 151 of 147: 450 W hold more than the data"
    f" sheet's clock; torchtune's LoRA on one comes to 139 with all that it does; {_SAME_KERNEL}; Ada whitepaper: 72 MB",
)  # fmt: skip
_RTX_40_LAPTOP = replace(_RTX_40, gemm=0.76, attention=0.54, is_laptop=True, source=_LAPTOP)
_ADA_PRO = replace(
    _RTX_40, half=1024, gemm=0.70, attention=0.51, has_peer_access=True,
    source=f"{_MATMUL}: 269 of 362 on an L40S, whose 350 W do not hold the clock; {_SAME_KERNEL}; Ada whitepaper",
)  # fmt: skip
_L40 = replace(_ADA_PRO, half=512)
_L20 = replace(_L40, gemm=0.92, attention=0.66, source=f"{_MATMUL}#107: 114 of 119.5; {_SAME_KERNEL}")
_L4 = replace(
    _ADA_PRO, gemm=0.47, attention=0.38,
    source=f"{_MATMUL}#120: 57 to 59 of 121 in large products, at 72 W; {_SAME_KERNEL}; Ada whitepaper",
)  # fmt: skip
_RTX_20 = Make(
    cc=(7, 5), half=512, fp32=128, link="pcie3", host_link="pcie3", threads=1024, gemm=0.80, attention=0.28, has_peer_access=False,
    source="the clock holds better than a T4's; no flash attention; from memory",
)  # fmt: skip
_RTX_20_LAPTOP = replace(_RTX_20, gemm=0.64, attention=0.22, is_laptop=True, source=_LAPTOP)
_T4 = replace(
    _RTX_20, half=1024, gemm=0.50, attention=0.20, has_peer_access=True,
    source=f"{_MATMUL}: 42 of 65 for a moment, 70 W halve the clock; no flash attention, from memory",
)  # fmt: skip
_RTX_30 = Make(
    cc=(8, 6), half=512, fp32=256, link="pcie4", host_link="pcie4", threads=1536, gemm=0.97, attention=0.70, has_peer_access=False,
    source=f"{_MATMUL}: 76 to 77 of 71 on an RTX 3090, as the clock is above the data sheet's; {_SAME_KERNEL}; GA102"
    " whitepaper",
)  # fmt: skip
_RTX_30_LAPTOP = replace(_RTX_30, gemm=0.78, attention=0.56, is_laptop=True, source=_LAPTOP)
_AMPERE_PRO = replace(
    _RTX_30, half=1024, gemm=0.76, attention=0.56, has_peer_access=True,
    source=f"{_MATMUL}: 123 of 154.8, #185: 111 to 122 of 149.7; {_SAME_KERNEL}; GA102 whitepaper",
)  # fmt: skip
_A10 = replace(_AMPERE_PRO, gemm=0.60, attention=0.45, source="150 W do not hold the clock; from memory")
_A10G = replace(
    _AMPERE_PRO, half=512, gemm=0.93, attention=0.66,
    source=f"{_MATMUL}#126: 67 to 69 of 70; {_SAME_KERNEL}; GA102 whitepaper",
)  # fmt: skip
_RTX_50 = Make(
    cc=(12, 0), half=512, fp32=256, link="pcie5", threads=1536, gemm=0.98, attention=0.75, has_peer_access=False,
    source=f"{_MATMUL}: 235 to 242 of 209.5 on an RTX 5090, as the clock is above the data sheet's; {_SAME_KERNEL}; RTX"
    " Blackwell whitepaper: 96 MB",
)  # fmt: skip
_RTX_50_LAPTOP = replace(_RTX_50, gemm=0.78, attention=0.60, is_laptop=True, source=_LAPTOP)
_BLACKWELL_PRO = replace(
    _RTX_50, half=1024, gemm=0.79, attention=0.58, has_peer_access=True,
    source=f"{_MATMUL}: 409 to 418 of 503.8; {_SAME_KERNEL}; RTX Blackwell PRO whitepaper: 128 MB",
)  # fmt: skip
_V100 = Make(
    cc=(7, 0), half=1024, fp32=128, link="nvlink2", host_link="pcie3", gemm=0.70, attention=0.30,
    source=f"{_MATMUL}: 89 to 97 of 125; no flash attention, from memory; V100 whitepaper: 6 MB",
)  # fmt: skip
_MI300 = Make(
    cc=(0, 0), half=2048, fp32=256, link="infinity-fabric", gemm=0.42, attention=0.20,
    source=f"{_MAMF}: 668 of 1307, the rest as on the H100; attention from memory; its cache is not counted",
)  # fmt: skip
_MI350 = replace(_MI300, half=4096, link="infinity-fabric-4", source="as the MI300X; from memory")

# fmt: off
_SMI = "memory as nvidia-smi prints it"
_AMPERE = "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_GA102 = "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_ADA_PRO_PAPER = "https://images.nvidia.com/aem-dam/en-zz/Solutions/technologies/NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_HGX = "https://www.nvidia.com/en-us/data-center/hgx/"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_BLACKWELL_PRO_PAPER = "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_CHINA = "no public data sheet; figures as widely reported"
_TURING = "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"
_GEFORCE = "https://www.techpowerup.com/gpu-specs/"
_LAPTOPS = f"{_GEFORCE}, but the boost clock of the largest power"
_MAX_Q = f"{_GEFORCE}, for the smallest power"
_RTX_A = f"{_GEFORCE} and https://www.nvidia.com/en-us/design-visualization/desktop-graphics/, data sheet of the card"
_RTX_PRO = f"{_RTX_A}: half precision as an eighth of its AI TOPS"
_MI = "https://www.amd.com/en/products/accelerators/instinct.html, data sheet of the card; memory as rocm-smi prints it"
_GB = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/ and gb300-nvl72, a 72nd of the rack"
_RTX_A16 = "https://images.nvidia.com/content/Solutions/data-center/vgpu-a16-datasheet.pdf, one of its four"
# fmt: on


def _row(  # the columns that differ in every row by name
    make: Make,
    *names: str,
    mib: int,
    sms: int,
    mhz: int,
    gbs: float,
    l2: int,
    source: str,
    half: float | None = None,
    fp32: float | None = None,
    link: str | None = None,
) -> Row:
    """Returns a row; FLOP/s that a data sheet does not name follow from multiprocessors and clock."""
    return Row(
        make=make,
        names=names,
        mib=mib,
        sms=sms,
        mhz=mhz,
        half=half or 1e-6 * sms * mhz * make.half,
        fp32=fp32 or 1e-6 * sms * mhz * make.fp32,
        gbs=gbs,
        l2=l2,
        link=link or make.link,
        source=source,
    )


# fmt: off
ROWS = (
    _row(_A100_SXM, "a100-80g", "a100-sxm", "a100-sxm4-80gb", mib=81920, sms=108, mhz=1410, half=312, fp32=19.5, gbs=2039, l2=20, source=f"{_A100}; {_SMI}"),
    _row(_A100_SXM, "a100-40g", "a100-sxm4-40gb", mib=40960, sms=108, mhz=1410, half=312, fp32=19.5, gbs=1555, l2=20, source=f"{_AMPERE}; {_SMI}"),
    _row(_A100_PCIE, "a100-80g-pcie", "a100-pcie", "a100-80gb-pcie", "a100-pcie-80gb", mib=81920, sms=108, mhz=1410, half=312, fp32=19.5, gbs=1935, l2=20, source=f"{_A100}; {_SMI}"),
    _row(_A100_PCIE, "a100-40g-pcie", "a100-40gb-pcie", "a100-pcie-40gb", mib=40960, sms=108, mhz=1410, half=312, fp32=19.5, gbs=1555, l2=20, source=f"{_AMPERE}; memory from the data sheet"),
    _row(_A100_SXM, "a800-80g", "a800-sxm4-80gb", mib=81920, sms=108, mhz=1410, half=312, fp32=19.5, gbs=2039, l2=20, link="nvlink3-a800", source=f"{_A100} (an A100 with less NVLink); {_SMI}"),
    _row(_A100_SXM, "a800-40g", "a800-sxm4-40gb", mib=40960, sms=108, mhz=1410, half=312, fp32=19.5, gbs=1555, l2=20, link="nvlink3-a800", source=f"{_A100} (an A100 with less NVLink); {_SMI}"),
    _row(_A100_PCIE, "a800-80g-pcie", "a800-pcie", "a800-80gb-pcie", mib=81920, sms=108, mhz=1410, half=312, fp32=19.5, gbs=1935, l2=20, source=f"{_A100} (an A100 with less NVLink); {_SMI}"),
    _row(_HOPPER_SXM, "h100-sxm", "h100", "h100-80g", "h100-sxm5", "h100-80gb-hbm3", mib=81559, sms=132, mhz=1830, half=989.4, fp32=66.9, gbs=3350, l2=25, source=f"{_H100}, {_HOPPER}; {_SMI}"),
    _row(_HOPPER_PCIE, "h100-pcie", mib=81559, sms=114, mhz=1620, half=756, fp32=51.2, gbs=2000, l2=25, source=f"{_HOPPER}; {_SMI}"),
    _row(_HOPPER_PCIE, "h100-nvl", mib=95830, sms=132, mhz=1545, half=835.5, fp32=60, gbs=3900, l2=25, source=f"{_H100} (1671 sparse; NVLink joins pairs only, so a ring runs on PCIe); {_SMI}"),
    _row(_HOPPER_SXM, "h800", "h800-80g", "h800-sxm", mib=81559, sms=132, mhz=1830, half=989.4, fp32=66.9, gbs=3350, l2=25, link="nvlink4-h800", source=f"{_H100} (an H100 with less NVLink); {_SMI}"),
    _row(_HOPPER_PCIE, "h800-pcie", mib=81559, sms=114, mhz=1620, half=756, fp32=51.2, gbs=2000, l2=25, source=f"{_HOPPER} (as the H100 PCIe); {_SMI}"),
    _row(_H20, "h20", "h20-96g", "h20-sxm", mib=97871, sms=78, mhz=1830, half=148, fp32=44, gbs=4000, l2=30, source=f"{_CHINA}, 142 TFLOP/s measured in https://github.com/zzc0721/torch-performance-test-data/issues/77; {_SMI}"),
    _row(_H20, "h20-141g", "h20-3e", mib=143771, sms=78, mhz=1830, half=148, fp32=44, gbs=4800, l2=30, source=f"{_CHINA} (an H20 with the H200's memory); {_SMI}"),
    _row(_HOPPER_SXM, "h200", "h200-sxm", "h200-141g", mib=143771, sms=132, mhz=1830, half=989.4, fp32=66.9, gbs=4800, l2=25, source=f"{_H200}; {_SMI}"),
    _row(_HOPPER_PCIE, "h200-nvl", mib=143771, sms=132, mhz=1545, half=835.5, fp32=60, gbs=4800, l2=25, source=f"{_H200} (NVLink joins two or four only, so a ring runs on PCIe); {_SMI}"),
    _row(_GRACE_HOPPER, "gh200", "gh200-96g", "gh200-480gb", "gh200-120gb", mib=97871, sms=132, mhz=1830, half=989.4, fp32=66.9, gbs=4000, l2=25, source=f"https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip; {_SMI}"),
    _row(_B200, "b200", "b200-sxm", "b200-180g", mib=183359, sms=148, mhz=1856, half=2250, fp32=75, gbs=7700, l2=63, source=f"{_HGX}; bandwidth from bus width × clock in https://github.com/pytorch/ao/pull/4002; {_SMI}"),
    _row(_B300, "b300", "b300-sxm", "b300-sxm6-ac", mib=275040, sms=148, mhz=1856, half=2250, fp32=75, gbs=8000, l2=63, source=f"{_HGX}; {_SMI}"),
    _row(_B200, "gb200", mib=189471, sms=152, mhz=2062, half=2500, fp32=80, gbs=8000, l2=63, source=f"{_GB}; {_SMI}"),
    _row(_B300, "gb300", mib=284208, sms=152, mhz=2062, half=2500, fp32=80, gbs=8000, l2=63, source=f"{_GB}; {_SMI}"),
    _row(_A10, "a10", mib=23028, sms=72, mhz=1695, half=125, fp32=31.2, gbs=600, l2=6, source=f"https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf; {_SMI}"),
    _row(_A10G, "a10g", mib=23028, sms=80, mhz=1710, half=70, fp32=31.5, gbs=600, l2=6, source=f"https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf; {_SMI}"),
    _row(_A30, "a30", mib=24576, sms=56, mhz=1440, half=165, fp32=10.3, gbs=933, l2=12, source=f"https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf; {_SMI}"),
    _row(_AMPERE_PRO, "a40", mib=46068, sms=84, mhz=1740, half=149.7, fp32=37.4, gbs=696, l2=6, source=f"https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf; {_SMI}"),
    _row(_A10, "a16", mib=15356, sms=10, mhz=1755, gbs=200, l2=2, link="pcie4x8", source=f"{_RTX_A16}; {_SMI}"),
    _row(_L4, "l4", mib=23034, sms=58, mhz=2040, half=121, fp32=30.3, gbs=300, l2=48, source=f"https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet (242 sparse); {_SMI}"),
    _row(_L20, "l20", mib=46068, sms=92, mhz=2520, half=119.5, fp32=59.8, gbs=864, l2=96, source=f"{_CHINA}; {_SMI}"),
    _row(_L40, "l40", mib=46068, sms=142, mhz=2490, half=181.05, fp32=90.5, gbs=864, l2=96, source=f"https://images.nvidia.com/content/Solutions/data-center/vgpu-L40-datasheet.pdf; {_SMI}"),
    _row(_ADA_PRO, "l40s", mib=46068, sms=142, mhz=2490, half=362.05, fp32=91.6, gbs=864, l2=96, source=f"https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413; {_SMI}"),
    _row(_RTX_30, "rtx-3090", mib=24576, sms=82, mhz=1695, half=71, fp32=35.6, gbs=936, l2=6, source=f"{_GA102}, appendix A: fp32 accumulation; {_SMI}"),
    _row(_RTX_30, "rtx-3050", mib=8192, sms=20, mhz=1777, gbs=224, l2=2, link="pcie4x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_30, "rtx-3050-6g", mib=6144, sms=18, mhz=1470, gbs=168, l2=1, link="pcie4x8", source=f"{_GEFORCE}; cache as deviceQuery prints it; {_SMI}"),
    _row(_RTX_30, "rtx-3060", mib=12288, sms=28, mhz=1777, gbs=360, l2=2, source=f"{_GEFORCE}; cache as deviceQuery prints it; {_SMI}"),
    _row(_RTX_30, "rtx-3060-8g", mib=8192, sms=28, mhz=1777, gbs=240, l2=2, source=f"{_GEFORCE}; cache not confirmed; {_SMI}"),
    _row(_RTX_30, "rtx-3060-ti", mib=8192, sms=38, mhz=1665, gbs=448, l2=3, source=f"{_GEFORCE}; cache as deviceQuery prints it; {_SMI}"),
    _row(_RTX_30, "rtx-3070", mib=8192, sms=46, mhz=1725, gbs=448, l2=4, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_30, "rtx-3070-ti", mib=8192, sms=48, mhz=1770, gbs=608, l2=4, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_30, "rtx-3080", mib=10240, sms=68, mhz=1710, gbs=760, l2=5, source=f"{_GA102}; {_SMI}"),
    _row(_RTX_30, "rtx-3080-12g", mib=12288, sms=70, mhz=1710, gbs=912, l2=6, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_30, "rtx-3080-ti", mib=12288, sms=80, mhz=1665, gbs=912, l2=6, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_30, "rtx-3090-ti", mib=24564, sms=84, mhz=1860, gbs=1008, l2=6, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3050-laptop", mib=4096, sms=16, mhz=1740, gbs=192, l2=1, link="pcie4x8", source=f"{_LAPTOPS}; cache as deviceQuery prints it; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3050-laptop-6g", "rtx-3050-6gb-laptop", mib=6144, sms=20, mhz=1492, gbs=168, l2=1, link="pcie4x8", source=f"{_LAPTOPS}; cache not confirmed; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3050-ti-laptop", mib=4096, sms=20, mhz=1695, gbs=192, l2=2, link="pcie4x8", source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3060-laptop", mib=6144, sms=30, mhz=1703, gbs=336, l2=3, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3070-laptop", mib=8192, sms=40, mhz=1620, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3070-ti-laptop", mib=8192, sms=46, mhz=1485, gbs=448, l2=4, source=f"{_LAPTOPS}; clock not confirmed; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3080-laptop", mib=8192, sms=48, mhz=1710, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3080-laptop-16g", mib=16384, sms=48, mhz=1710, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_30_LAPTOP, "rtx-3080-ti-laptop", mib=16384, sms=58, mhz=1590, gbs=512, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_40, "rtx-4090", mib=24564, sms=128, mhz=2520, half=165.2, fp32=82.6, gbs=1008, l2=72, source=f"{_ADA}, appendix A: fp32 accumulation; {_SMI}"),
    _row(_RTX_40, "rtx-4090-d", mib=24564, sms=114, mhz=2520, half=147, fp32=73.5, gbs=1008, l2=72, source=f"{_ADA}: the RTX 4090 × 14592/16384 cores; {_SMI}"),
    _row(_RTX_40, "rtx-4060", mib=8188, sms=24, mhz=2460, gbs=272, l2=24, link="pcie4x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4060-ti", mib=8188, sms=34, mhz=2535, gbs=288, l2=32, link="pcie4x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4060-ti-16g", mib=16380, sms=34, mhz=2535, gbs=288, l2=32, link="pcie4x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4070", mib=12282, sms=46, mhz=2475, gbs=504, l2=36, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4070-super", mib=12282, sms=56, mhz=2475, gbs=504, l2=48, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4070-ti", mib=12282, sms=60, mhz=2610, gbs=504, l2=48, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4070-ti-super", mib=16376, sms=66, mhz=2610, gbs=672, l2=48, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40, "rtx-4080", mib=16376, sms=76, mhz=2505, gbs=717, l2=64, source=f"{_ADA}; {_SMI}"),
    _row(_RTX_40, "rtx-4080-super", mib=16376, sms=80, mhz=2550, gbs=736, l2=64, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_40_LAPTOP, "rtx-4050-laptop", mib=6141, sms=20, mhz=2370, gbs=192, l2=24, link="pcie4x8", source=f"{_LAPTOPS}; cache as deviceQuery prints it; {_SMI}"),
    _row(_RTX_40_LAPTOP, "rtx-4060-laptop", mib=8188, sms=24, mhz=2370, gbs=256, l2=32, link="pcie4x8", source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_40_LAPTOP, "rtx-4070-laptop", mib=8188, sms=36, mhz=2175, gbs=256, l2=32, link="pcie4x8", source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_40_LAPTOP, "rtx-4080-laptop", mib=12282, sms=58, mhz=2280, gbs=432, l2=48, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_40_LAPTOP, "rtx-4090-laptop", mib=16376, sms=76, mhz=2040, gbs=576, l2=64, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_50, "rtx-5090", mib=32607, sms=170, mhz=2407, half=209.5, fp32=104.8, gbs=1792, l2=96, source=f"{_BLACKWELL}, appendix A: fp32 accumulation; {_SMI}"),
    _row(_RTX_50, "rtx-5050", mib=8151, sms=20, mhz=2572, gbs=320, l2=24, link="pcie5x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_50, "rtx-5060", mib=8151, sms=30, mhz=2497, gbs=448, l2=24, link="pcie5x8", source=f"{_GEFORCE}; cache as deviceQuery prints it; {_SMI}"),
    _row(_RTX_50, "rtx-5060-ti", mib=8151, sms=36, mhz=2572, gbs=448, l2=32, link="pcie5x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_50, "rtx-5060-ti-16g", mib=16311, sms=36, mhz=2572, gbs=448, l2=32, link="pcie5x8", source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_50, "rtx-5070", mib=12227, sms=48, mhz=2512, gbs=672, l2=48, source=f"{_BLACKWELL}; {_SMI}"),
    _row(_RTX_50, "rtx-5070-ti", mib=16303, sms=70, mhz=2452, gbs=896, l2=48, source=f"{_BLACKWELL}; {_SMI}"),
    _row(_RTX_50, "rtx-5080", mib=16303, sms=84, mhz=2617, gbs=960, l2=64, source=f"{_BLACKWELL}; {_SMI}"),
    _row(_RTX_50_LAPTOP, "rtx-5050-laptop", mib=8151, sms=20, mhz=2662, gbs=384, l2=32, source=f"{_LAPTOPS}; clock not confirmed; {_SMI}"),
    _row(_RTX_50_LAPTOP, "rtx-5060-laptop", mib=8151, sms=26, mhz=2497, gbs=384, l2=32, source=f"{_LAPTOPS}; clock not confirmed; {_SMI}"),
    _row(_RTX_50_LAPTOP, "rtx-5070-laptop", mib=8151, sms=36, mhz=2347, gbs=384, l2=32, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_50_LAPTOP, "rtx-5070-ti-laptop", mib=12227, sms=46, mhz=2220, gbs=672, l2=48, source=f"{_LAPTOPS}; clock not confirmed; {_SMI}"),
    _row(_RTX_50_LAPTOP, "rtx-5080-laptop", mib=16303, sms=60, mhz=2287, gbs=896, l2=64, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_50_LAPTOP, "rtx-5090-laptop", mib=24463, sms=82, mhz=2160, gbs=896, l2=64, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a6000", mib=49140, sms=84, mhz=1800, half=154.8, fp32=38.7, gbs=768, l2=6, source=f"{_GA102}, appendix; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a2000", mib=6138, sms=26, mhz=1200, half=31.95, fp32=8.0, gbs=288, l2=3, source=f"{_RTX_A}; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a2000-12g", mib=12282, sms=26, mhz=1200, half=31.95, fp32=8.0, gbs=288, l2=3, source=f"{_RTX_A}; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a4000", mib=16376, sms=48, mhz=1560, half=76.7, fp32=19.2, gbs=448, l2=4, source=f"{_RTX_A}; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a4500", mib=20470, sms=56, mhz=1650, half=94.6, fp32=23.7, gbs=640, l2=6, source=f"{_RTX_A}; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a5000", mib=24564, sms=64, mhz=1695, half=111.1, fp32=27.8, gbs=768, l2=6, source=f"{_RTX_A}; {_SMI}"),
    _row(_AMPERE_PRO, "rtx-a5500", mib=24564, sms=80, mhz=1665, half=136.4, fp32=34.1, gbs=768, l2=6, source=f"{_RTX_A}; {_SMI}"),
    _row(_ADA_PRO, "rtx-6000-ada", mib=49140, sms=142, mhz=2505, half=364.2, fp32=91.1, gbs=960, l2=96, source=f"{_ADA_PRO_PAPER}; {_SMI}"),
    _row(_ADA_PRO, "rtx-2000-ada", mib=16380, sms=22, mhz=2130, half=47.95, fp32=12.0, gbs=224, l2=12, link="pcie4x8", source=f"{_RTX_A}; cache not confirmed; {_SMI}"),
    _row(_ADA_PRO, "rtx-4000-ada", mib=20475, sms=48, mhz=2175, half=106.9, fp32=26.7, gbs=360, l2=48, source=f"{_RTX_A}; {_SMI}"),
    _row(_ADA_PRO, "rtx-4500-ada", mib=24570, sms=60, mhz=2580, half=158.5, fp32=39.6, gbs=432, l2=48, source=f"{_RTX_A}; {_SMI}"),
    _row(_ADA_PRO, "rtx-5000-ada", mib=32760, sms=100, mhz=2550, half=261.1, fp32=65.3, gbs=576, l2=72, source=f"{_RTX_A}; {_SMI}"),
    _row(_ADA_PRO, "rtx-5880-ada", mib=49140, sms=110, mhz=2460, half=277.1, fp32=69.3, gbs=960, l2=72, source=f"{_RTX_A}; bandwidth not confirmed; {_SMI}"),
    _row(_BLACKWELL_PRO, "rtx-pro-6000", "rtx-pro-6000-server", mib=97887, sms=188, mhz=2617, half=503.8, fp32=125, gbs=1597, l2=128, source=f"{_BLACKWELL_PRO_PAPER}; bandwidth of the Server Edition; {_SMI}"),
    _row(_BLACKWELL_PRO, "rtx-pro-4000", mib=24467, sms=70, mhz=2055, half=147.3, gbs=672, l2=48, source=f"{_RTX_PRO}; {_SMI}"),
    _row(_BLACKWELL_PRO, "rtx-pro-4500", mib=32623, sms=82, mhz=2511, half=210.9, gbs=896, l2=64, source=f"{_RTX_PRO}; {_SMI}"),
    _row(_BLACKWELL_PRO, "rtx-pro-5000", mib=48935, sms=110, mhz=2290, half=258.0, gbs=1344, l2=96, source=f"{_RTX_PRO}; {_SMI}"),
    _row(_BLACKWELL_PRO, "rtx-pro-6000-workstation", mib=97887, sms=188, mhz=2617, half=503.8, fp32=125, gbs=1792, l2=128, source=f"{_BLACKWELL_PRO_PAPER}; {_SMI}"),
    _row(_BLACKWELL_PRO, "rtx-pro-6000-max-q", "rtx-pro-6000-max-q-workstation", mib=97887, sms=188, mhz=2280, half=438.9, fp32=110, gbs=1792, l2=128, source=f"{_BLACKWELL_PRO_PAPER}; {_SMI}"),
    _row(_V100, "v100-32g", "v100-sxm2-32gb", "v100-sxm3-32gb", mib=32768, sms=80, mhz=1530, half=125, fp32=15.7, gbs=900, l2=6, source=f"{_VOLTA}; {_SMI} (32510 with drivers before 515)"),
    _row(_V100, "v100-16g", "v100-sxm2-16gb", mib=16384, sms=80, mhz=1530, half=125, fp32=15.7, gbs=900, l2=6, source=f"{_VOLTA}; {_SMI} (16160 with drivers before 515)"),
    _row(_V100, "v100-32g-pcie", "v100-pcie-32gb", mib=32768, sms=80, mhz=1370, half=112, fp32=14, gbs=900, l2=6, link="pcie3", source=f"{_VOLTA}; memory as the SXM2 card's"),
    _row(_V100, "v100-16g-pcie", "v100-pcie", "v100-pcie-16gb", mib=16384, sms=80, mhz=1370, half=112, fp32=14, gbs=900, l2=6, link="pcie3", source=f"{_VOLTA}; memory as the SXM2 card's"),
    _row(_T4, "t4", mib=15360, sms=40, mhz=1590, half=65, fp32=8.1, gbs=320, l2=4, source=f"https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf; {_SMI} (15109 with drivers before 515)"),
    _row(_RTX_20, "rtx-2060", mib=6144, sms=30, mhz=1680, gbs=336, l2=3, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_20, "rtx-2060-12g", mib=12288, sms=34, mhz=1650, gbs=336, l2=3, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_20, "rtx-2060-super", mib=8192, sms=34, mhz=1650, gbs=448, l2=4, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_20, "rtx-2070", mib=8192, sms=36, mhz=1620, gbs=448, l2=4, source=f"{_TURING}; {_SMI}"),
    _row(_RTX_20, "rtx-2070-super", mib=8192, sms=40, mhz=1770, gbs=448, l2=4, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_20, "rtx-2080", mib=8192, sms=46, mhz=1710, gbs=448, l2=4, source=f"{_TURING}; {_SMI}"),
    _row(_RTX_20, "rtx-2080-super", mib=8192, sms=48, mhz=1815, gbs=496, l2=4, source=f"{_GEFORCE}; {_SMI}"),
    _row(_RTX_20, "rtx-2080-ti", mib=11264, sms=68, mhz=1545, gbs=616, l2=5, source=f"{_TURING}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2060-laptop", mib=6144, sms=30, mhz=1560, gbs=264, l2=3, source=f"{_LAPTOPS}; the version of 2020; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2060-max-q", mib=6144, sms=30, mhz=1185, gbs=264, l2=3, source=f"{_MAX_Q}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2070-laptop", mib=8192, sms=36, mhz=1440, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2070-max-q", mib=8192, sms=36, mhz=1185, gbs=384, l2=4, source=f"{_MAX_Q}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2070-super-laptop", mib=8192, sms=40, mhz=1380, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2070-super-max-q", mib=8192, sms=40, mhz=1155, gbs=352, l2=4, source=f"{_MAX_Q}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2080-laptop", mib=8192, sms=46, mhz=1590, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2080-max-q", mib=8192, sms=46, mhz=1095, gbs=384, l2=4, source=f"{_MAX_Q}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2080-super-laptop", mib=8192, sms=48, mhz=1560, gbs=448, l2=4, source=f"{_LAPTOPS}; {_SMI}"),
    _row(_RTX_20_LAPTOP, "rtx-2080-super-max-q", mib=8192, sms=48, mhz=975, gbs=352, l2=4, source=f"{_MAX_Q}; {_SMI}"),
    _row(_MI300, "mi300x", "mi300x-oam", mib=196592, sms=304, mhz=2100, half=1307.4, fp32=163.4, gbs=5300, l2=0, source="https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf; memory as rocm-smi prints it"),
    _row(_MI300, "mi325x", "mi325x-oam", mib=262128, sms=304, mhz=2100, half=1307.4, fp32=163.4, gbs=6000, l2=0, source=_MI),
    _row(_MI350, "mi350x", "mi350x-oam", mib=294896, sms=256, mhz=2200, half=2306.9, fp32=144.2, gbs=8000, l2=0, source=_MI),
    _row(_MI350, "mi355x", "mi355x-oam", mib=294896, sms=256, mhz=2400, half=2516.6, fp32=157.3, gbs=8000, l2=0, source=_MI),
)
# fmt: on
