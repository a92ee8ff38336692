"""The FlashAttention kernels that Transformers loads: which GPUs run them, and which of them this machine has."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from dstrain.choices import Attention
from dstrain.facts import probe
from dstrain.facts.cluster.gpus import Gpu, from_nvml
from dstrain.facts.deepspeed_ops import torch_build
from dstrain.facts.releases import installed, is_in_range, release
from dstrain.facts.this_machine import hf_hub_cache, is_hub_offline

LOADER, LOADER_RANGE = "kernels", ">=0.18.2,<0.19"
"""The package that loads kernels of the hub. Source: Transformers 5.23 utils/import_utils.py: KERNELS_MIN_VERSION."""
VARIABLES = frozenset(
    {"HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "KERNELS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
)
"""The variables that say where the kernels of the hub are cached, and whether the hub is asked for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One version of FlashAttention."""

    attn: Attention
    distribution: str
    """Its package, as pip names it."""
    module: str
    spec: str
    """The releases that Transformers takes."""
    repo: str
    """The repository of its build on the Hugging Face hub, which `kernels` loads if the package is missing."""
    version: int
    """The version of that repository."""
    majors: tuple[int, ...]
    """Major compute capabilities on which it is of use."""
    install: str
    """How its package is installed."""


KERNELS = (
    Kernel(attn=Attention.FLASH_ATTENTION_3, distribution="flash-attn-3", module="flash_attn_interface", spec=">=0",
        repo="kernels-community/vllm-flash-attn3", version=1, majors=(9,),
        install="build flash-attention's folder hopper"),
    Kernel(attn=Attention.FLASH_ATTENTION_4, distribution="flash-attn-4", module="flash_attn", spec=">=0",
        repo="kernels-community/flash-attn4", version=0, majors=(9, 10), install="pip install flash-attn-4"),
    Kernel(attn=Attention.FLASH_ATTENTION_2, distribution="flash-attn", module="flash_attn", spec=">=2.3.3",
        repo="kernels-community/flash-attn2", version=3, majors=(8, 9, 10, 11, 12),
        install="pip install flash-attn --no-build-isolation"),
)  # fmt: skip
"""The best first. Sources: Transformers 5.23 modeling_flash_attention_utils.py: FLASH_ATTENTION_COMPATIBILITY_MATRIX,
FLASH_ATTN_KERNEL_FALLBACK and FLASH_ATTN_KERNEL_VERSIONS, utils/import_utils.py: is_flash_attn_2_available;
flash-attention's README: 3 is for Hopper, 4 for Hopper and Blackwell."""
OF = MappingProxyType({kernel.attn: kernel for kernel in KERNELS})
"""Kernels by the name of the implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """The FlashAttention kernels of one machine that its GPUs run."""

    packages: Mapping[str, str] = field(default_factory=dict)
    """Implementation → release of its package."""
    cached: Mapping[str, str] = field(default_factory=dict)
    """Implementation → commit of its build in the cache of the hub, which ranks load if there is no package."""
    downloadable: tuple[str, ...] = ()
    """Implementations that ranks can download from the hub as they start."""

    def source(self, attn: Attention, *, only_packages: bool = False, only_hub: bool = False) -> str | None:
        """Returns where an implementation comes from; None if it is missing. A package wins over the hub."""
        if attn in self.packages and not only_hub:
            return f"{OF[attn].distribution} {self.packages[attn]}"
        if attn in self.cached and not only_packages:
            return f"{OF[attn].repo} {self.cached[attn][:7]}"
        return None


def runs_on(gpu: Gpu, attn: Attention) -> bool:
    """Returns whether an implementation runs on a GPU.

    >>> from dstrain.facts.cluster.gpus import gpu
    >>> [runs_on(gpu(name), Attention.FLASH_ATTENTION_3) for name in ("h100", "a100", "b200")]
    [True, False, False]
    """
    if attn is Attention.FLASH_ATTENTION_2:
        return gpu.has_flash_attention_2
    return attn not in OF or gpu.compute_capability[0] in OF[attn].majors


def of_this_machine(environment: Mapping[str, str] = os.environ) -> AttentionKernels:
    """Returns the kernels of this machine that its GPUs run, for ranks with this environment."""
    gpus = [from_nvml(gpu.name, gpu.memory_mib, gpu.chip) for gpu in probe.local_gpus()]
    return here([gpu.compute_capability for gpu in gpus], environment)


def here(capabilities: Collection[tuple[int, int]], environment: Mapping[str, str]) -> AttentionKernels:
    """Returns the kernels of this machine that GPUs of all these compute capabilities run; nothing is imported.

    Without capabilities, as on AMD's GPUs and on a machine that starts ranks elsewhere, all of them count.
    """
    is_cuda, is_amd = torch_build("cuda") is not None, torch_build("hip") is not None
    majors = {major for major, _ in capabilities}
    usable = [kernel for kernel in KERNELS if (is_cuda or is_amd) and majors <= set(kernel.majors)]
    packages = {kernel.attn.value: version for kernel in usable if (version := _package(kernel)) is not None}
    loaded = usable if is_cuda and _has_loader() else []
    cached = {kernel.attn.value: commit for kernel in loaded if (commit := _cached(kernel, environment)) is not None}
    missing = () if is_hub_offline(environment) else tuple(k.attn.value for k in loaded if k.attn not in cached)
    return AttentionKernels(packages=packages, cached=cached, downloadable=missing)


def _package(kernel: Kernel) -> str | None:
    """Returns the release of a kernel's package, if Transformers takes it; 2 and 4 share a module."""
    version = installed(kernel.distribution)
    is_usable = version is not None and is_in_range(version, kernel.spec) and find_spec(kernel.module) is not None
    return version if is_usable else None


def _has_loader() -> bool:
    version = installed(LOADER)
    return version is not None and is_in_range(version, LOADER_RANGE)


def repo_version(kernel: Kernel) -> int:
    """Returns the version of a kernel's repository that Transformers asks for with the installed PyTorch."""
    is_new = release(installed("torch") or "0") >= (2, 10)
    return kernel.version + 1 if is_new and kernel.attn is Attention.FLASH_ATTENTION_2 else kernel.version


def _cached(kernel: Kernel, environment: Mapping[str, str]) -> str | None:
    """Returns the commit of a kernel in this machine's cache that has a build for its PyTorch; None without one.

    Source: kernels 0.17 _versions.py: _get_available_versions_from_cache, resolver.py: resolve_hub_cache_kernel.
    """
    folder = Path(environment.get("KERNELS_CACHE") or hf_hub_cache(environment)).expanduser()
    for kind in ("kernels", "models"):
        repo = folder / "--".join((kind, *kernel.repo.split("/")))
        try:
            commit = (repo / "refs" / f"v{repo_version(kernel)}").read_text(encoding="utf-8").strip()
            builds = [path.name for path in (repo / "snapshots" / commit / "build").iterdir()]
        except OSError:
            continue
        if any(_fits(name) for name in builds):
            return commit
    return None


_BUILD = re.compile(
    r"torch(?P<stable>-stable-abi)?(?P<torch>\d{2,3})(?:-cxx11|-cxx98)?-cu(?P<cuda>\d{2,3})-(?P<cpu>\w+)-linux"
)


def _fits(build: str) -> bool:
    """Returns whether a build is for this machine's PyTorch, CUDA and processor.

    Its CUDA has the same major and no newer minor release. Source: kernels 0.17 variants.py: _filter_variants.
    """
    if build in {"torch-cuda", "torch-universal"}:
        return True
    match, cuda = _BUILD.fullmatch(build), torch_build("cuda")
    if match is None or cuda is None or match["cpu"] != platform.machine():
        return False
    torch, built = release(installed("torch") or "0")[:2], (int(match["torch"][0]), int(match["torch"][1:]))
    here_cuda, built_cuda = release(cuda)[:2], (int(match["cuda"][:-1]), int(match["cuda"][-1]))
    is_of_torch = built <= torch if match["stable"] else built == torch
    return is_of_torch and built_cuda[0] == here_cuda[0] and built_cuda[1] <= here_cuda[1]
