"""Probes versions of Python, dstrain's dependencies, torch's CUDA, and nvcc."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from dstrain.doctor.facts import Question, Software
from dstrain.doctor.run_probes import run
from dstrain.facts.deepspeed_ops import torch_build
from dstrain.facts.model.kernel_packages import DISTRIBUTIONS
from dstrain.facts.releases import installed
from dstrain.facts.this_machine import versions

_NVCC_S = 2.0
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def look(question: Question, environment: Mapping[str, str]) -> Software:
    """Returns the versions; nothing heavy is imported for them."""
    ranges = _ranges()
    nvcc = nvcc_path(environment)
    return Software(
        python=platform.python_version(),
        tested_pythons=_tested_pythons(),
        packages={name: installed(name) for name in ranges},
        ranges=ranges,
        kernels={name: installed(name) for name in DISTRIBUTIONS},
        compilers={name: installed(name) for name in ("triton", "tilelang")},
        same=versions() | {name: installed(name) for name in _NCCL},
        torch_cuda=torch_build("cuda"),
        nvcc=None if nvcc is None else _release(nvcc, environment),
        nvcc_path=nvcc,
    )


def _ranges() -> dict[str, str]:
    """Returns the packages that dstrain needs, with the versions it is tested with. Source: setup.cfg, as installed."""
    try:
        required = metadata.requires("dstrain") or []
    except metadata.PackageNotFoundError:
        return {}
    ranges = {}
    for line in required:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?([^;)]*)", line)
        if match is not None and "extra ==" not in line:
            ranges[match[1]] = match[2].replace(" ", "")
    return ranges


def _tested_pythons() -> tuple[str, ...]:
    try:
        classifiers = metadata.metadata("dstrain").get_all("Classifier") or []
    except metadata.PackageNotFoundError:
        return ()
    versions = [line.rpartition(" :: ")[2] for line in classifiers if "Programming Language :: Python :: 3." in line]
    return tuple(versions)


def nvcc_path(environment: Mapping[str, str]) -> str | None:
    """Returns the nvcc that PyTorch would build with, or None. Source: torch 2.13 utils/cpp_extension.py:
    _find_cuda_home."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        path = Path(home) / "bin" / "nvcc"
        return str(path) if path.is_file() else None
    on_path = shutil.which("nvcc", path=environment.get("PATH"))
    usual = Path("/usr/local/cuda/bin/nvcc")
    return on_path or (str(usual) if usual.is_file() else None)


def _release(nvcc: str, environment: Mapping[str, str]) -> str | None:
    """Returns the release that nvcc names, such as `12.8`."""
    match = re.search(r"release (\d+\.\d+)", run([nvcc, "--version"], environment, _NVCC_S).out)
    return match[1] if match else None
