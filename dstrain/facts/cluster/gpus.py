"""GPUs by name: rows of `gpu_table`, and others that this machine has."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.gpu_table import ROWS, Row

CPU = "cpu"
"""Name of the row for machines without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    """Its short name, such as `h100-sxm`."""
    aliases: tuple[str, ...]
    """Other names that `--gpu` takes, and the names that NVML reports; `_folded` tells which letters count."""
    memory_mib: int
    """Total memory in MiB, as nvidia-smi shows it; 0 for `cpu`: a cluster fills in each rank's share of RAM."""
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
    like: str = ""
    """The row by which a GPU outside the table is planned."""
    scaled_multiprocessors: int = 0
    """Streaming multiprocessors of a GPU outside the table; 0 if unknown."""

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
        """Whether it is a row of the table; any other GPU is planned as the nearest row (`like`), scaled."""
        return self.source != _NVML

    @property
    def num_multiprocessors(self) -> int:
        """Streaming multiprocessors; 0 if unknown, and of makers other than NVIDIA."""
        row = self._row
        of_row = row.sms if row is not None and row.make.cc > (0, 0) else 0
        return self.scaled_multiprocessors if self.like else of_row

    @property
    def threads(self) -> int:
        """Threads that a multiprocessor holds at most; 0 if unknown."""
        return self._row.make.threads if self._row is not None else 0

    @property
    def host_link(self) -> str:
        """The link to its host, a name in `links`; Grace Hopper's own goes by NVLink."""
        if self._row is None or self.link.startswith("pcie"):
            return self.link
        return self._row.make.host_link

    @property
    def cache_mib(self) -> int:
        """Level-2 cache that one kernel can leave to the next; 0 if it does not count."""
        return self._row.l2 if self._row is not None else 0

    @property
    def gemm_ratio(self) -> float:
        """Share of the peak that large matrix products reach; that in the middle of the table if it is unknown."""
        return self._row.make.gemm if self._row is not None else 0.60

    @property
    def attention_ratio(self) -> float:
        """The same of attention."""
        return self._row.make.attention if self._row is not None else 0.40

    @property
    def _row(self) -> Row | None:
        return _ROWS.get(self.like or self.name)

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

    @property
    def lacks_bf16(self) -> bool:
        """Whether it is a known GPU whose matrix products run in fp16 and not in bf16."""
        return self.fp16_flops_per_s > 0 and not self.has_bf16


_NVML = "NVML"
"""The source of a GPU that is not in the table."""


def _gpu(row: Row) -> Gpu:
    """Returns the record of a row."""
    make, half = row.make, row.half * 1e12
    is_amd = make.cc == (0, 0)
    return Gpu(
        name=row.names[0],
        aliases=row.names[1:],
        memory_mib=row.mib,
        bf16_flops_per_s=half if is_amd or make.cc >= (8, 0) else 0.0,
        fp16_flops_per_s=half,
        fp32_flops_per_s=row.fp32 * 1e12,
        hbm_bytes_per_s=row.gbs * 1e9,
        link=row.link,
        compute_capability=make.cc,
        has_flash_attention_2=is_amd or make.cc >= (8, 0),
        has_peer_access=make.has_peer_access,
        source=row.source,
    )


_CPU = Gpu(
    name=CPU,
    aliases=("none", "no-gpu"),
    memory_mib=0,
    bf16_flops_per_s=0,
    fp16_flops_per_s=0,
    fp32_flops_per_s=0,
    hbm_bytes_per_s=0,
    link="loopback",
    compute_capability=(0, 0),
    has_flash_attention_2=False,
    has_peer_access=True,
    source="no GPU, for trying things out: no speed, so that no time is predicted; PyTorch's bf16 on most CPUs is"
    " slower than fp32, so it counts as having none",
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in (*map(_gpu, ROWS), _CPU)})
"""Every GPU by name."""
NAMES = tuple(name for gpu in GPUS.values() for name in (gpu.name, *gpu.aliases))
"""Every name that `gpu` takes."""

_ROWS: Mapping[str, Row] = MappingProxyType({row.names[0]: row for row in ROWS})
_WITHOUT_MEANING = frozenset(
    (
        "nvidia",
        "amd",
        "tesla",
        "geforce",
        "instinct",
        "gpu",
        "generation",
        "blackwell",
        "edition",
        "with",
        "design",
    )
)
"""Words of names that tell no two GPUs apart."""
_MEMORY = re.compile(r"(\d+)gb?")


def _words(name: str) -> list[str]:
    words = (
        word for word in re.findall(r"[a-z0-9]+", name.lower().replace("rtx", " ")) if word not in _WITHOUT_MEANING
    )
    return ["laptop" if word in ("mobile", "m") else word for word in words]


def _folded(name: str) -> str:
    """Returns a name in the letters that count.

    >>> _folded("Tesla V100-SXM2-32GB"), _folded("NVIDIA GeForce RTX 4090 Laptop GPU")
    ('v100sxm232g', '4090laptop')
    """
    *words, last = _words(name) or [""]
    return "".join((*words, f"{size[1]}g" if (size := _MEMORY.fullmatch(last)) else last))


def _without_memory(name: str) -> tuple[str, int]:
    """Returns a name without the GiB at its end, and these; 0 without."""
    *words, last = _words(name) or [""]
    size = _MEMORY.fullmatch(last)
    return ("".join(words), int(size[1])) if size and words else (_folded(name), 0)


def _by_folded() -> dict[str, list[Gpu]]:
    """Returns GPUs by their names, and by these without the memory; the usual one of several comes first."""
    found: dict[str, list[Gpu]] = defaultdict(list)
    for names in (lambda name: _folded(name), lambda name: _without_memory(name)[0]):
        for gpu in GPUS.values():
            for folded in dict.fromkeys(map(names, (gpu.name, *gpu.aliases))):
                if gpu not in found[folded]:
                    found[folded].append(gpu)
    return dict(found)


_BY_FOLDED: Mapping[str, list[Gpu]] = MappingProxyType(_by_folded())
_ALIKE_RATIO = 0.06
"""How far the memory that nvidia-smi shows is from the GiB in a name, at most."""


def gpu(name: str) -> Gpu:
    """Returns the GPU of that name or alias; case, dashes, spaces, makers' words and series do not count.

    Raises InvalidConfig with the nearest name of its family, or with all of them if none is near.

    >>> gpu("A100 80GB").name, gpu("NVIDIA H100").name, gpu("4090").memory_mib, gpu("4060ti-16g").name
    ('a100-80g', 'h100-sxm', 24564, 'rtx-4060-ti-16g')
    """
    if rows := _BY_FOLDED.get(_folded(name)):
        return rows[0]
    base, gib = _without_memory(name)
    for row in _BY_FOLDED.get(base, ()) if gib else ():
        if abs(row.memory_mib / 1024 - gib) <= _ALIKE_RATIO * gib:
            return row
    near = _nearest(name)
    hint = f'Did you mean "{near.name}"?' if near else "Known: " + ", ".join(GPUS)
    raise InvalidConfig(f'--gpu: "{name}" is not a GPU that dstrain knows', hint=hint)


def _nearest(name: str) -> Gpu | None:
    """Returns the GPU with the nearest name of the same family: letters and the first digit that follows."""
    folded = _folded(name)
    rows = [other for other in _BY_FOLDED if _family(other) == _family(folded)]
    closest = difflib.get_close_matches(folded, rows, n=1, cutoff=0.6)
    return _BY_FOLDED[closest[0]][0] if closest else None


def _family(folded: str) -> str:
    """Returns the letters at the beginning of a name, and the digit that follows.

    >>> _family("3060"), _family("b300"), _family("a100pcie")
    ('3', 'b3', 'a1')
    """
    found = re.match(r"[a-z]*\d?", folded)
    return found[0] if found else ""


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
    """Returns the GPU that NVML calls `name`: its row with the measured memory (0: the table's), else the nearest
    row of its generation, scaled.

    Only a whole name counts: an `A100X` is not the card that its name begins with. Of several rows of one name the one
    with the nearest memory counts.

    >>> from_nvml("NVIDIA A100-SXM4-80GB", 81920).name, from_nvml("NVIDIA GeForce RTX 3060", 8192).name
    ('a100-80g', 'rtx-3060-8g')
    """
    rows = _BY_FOLDED.get(_folded(name))
    if not rows:
        return _unlisted(name, memory_mib, chip)
    row = min(rows, key=lambda row: abs(row.memory_mib - memory_mib)) if memory_mib else rows[0]
    return replace(row, memory_mib=memory_mib or row.memory_mib)


def is_called(reported: str, name: str) -> bool:
    """Returns whether `name` means the GPU that NVML reports.

    >>> is_called("NVIDIA GeForce RTX 6070", "rtx-6070"), is_called("NVIDIA GeForce RTX 6070", "rtx-5090")
    (True, False)
    """
    return _folded(reported) == _folded(name)


def _unlisted(name: str, memory_mib: int, chip: Chip | None) -> Gpu:
    """Returns a GPU that is not in the table: the nearest row of its generation, scaled by multiprocessors, by a lower
    clock, and by the memory's clock and width.

    GPUs older than all rows have no tensor cores, and no row to scale. Nothing is scaled without `chip`.
    """
    has_peer_access = "geforce" not in name.lower()
    unknown = replace(_CPU, name=name, aliases=(), memory_mib=memory_mib, link="pcie4", has_peer_access=has_peer_access)
    unknown = replace(unknown, source=_NVML)
    if chip is None:
        return unknown
    # two transfers per clock of the memory
    bandwidth = 2e6 * chip.memory_clock_mhz * chip.memory_bus_bits / 8
    row = _relative(name, chip)
    if row is None:
        fp32, capability = 2e6 * chip.num_cores * chip.sm_clock_mhz, chip.compute_capability
        return replace(unknown, fp32_flops_per_s=fp32, hbm_bytes_per_s=bandwidth, compute_capability=capability)
    like, sms = _gpu(row), 2 * chip.num_cores / row.make.fp32
    ratio = sms / row.sms * min(row.mhz, chip.sm_clock_mhz or row.mhz) / row.mhz
    return replace(
        like,
        name=name,
        aliases=(),
        memory_mib=memory_mib,
        bf16_flops_per_s=ratio * like.bf16_flops_per_s,
        fp16_flops_per_s=ratio * like.fp16_flops_per_s,
        fp32_flops_per_s=ratio * like.fp32_flops_per_s,
        hbm_bytes_per_s=bandwidth or sms / row.sms * like.hbm_bytes_per_s,
        link=row.link if row.link.startswith("pcie") else "pcie4",
        compute_capability=chip.compute_capability,
        has_peer_access=has_peer_access,
        source=_NVML,
        scaled_multiprocessors=round(sms),
        like=like.name,
    )


def _relative(name: str, chip: Chip) -> Row | None:
    """Returns the row of a chip's compute capability, or of the next lower one, that is most like it: for laptops or
    not, GeForce or not, and of those the one with the nearest number of cores."""
    older = [row for row in ROWS if (0, 0) < row.make.cc <= chip.compute_capability]
    latest = max((row.make.cc for row in older), default=None)
    words = name.lower().split()

    def distance(row: Row) -> tuple[bool, bool, float]:
        is_geforce = not row.make.has_peer_access
        cores = row.sms * row.make.fp32 / 2
        return (
            row.make.is_laptop != ("laptop" in words),
            is_geforce != ("geforce" in words),
            max(cores, chip.num_cores) / max(1, min(cores, chip.num_cores)),
        )

    return min((row for row in older if row.make.cc == latest), key=distance, default=None)
