"""Probes versions, compilers and DeepSpeed's extensions, process limits, RAM and disks."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

import psutil

from dstrain.doctor.facts import Folder, Limits, Question, Software, Space, Toolchain
from dstrain.doctor.run_probes import run
from dstrain.facts.deepspeed_ops import OPS, extension_folder, missing_ops, torch_build, unheld_locks
from dstrain.facts.model.traits import DISTRIBUTIONS
from dstrain.facts.probe import host_memory_bytes
from dstrain.facts.releases import installed
from dstrain.facts.this_machine import versions
from dstrain.paths import existing

_SHM = Path("/dev/shm")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")


def look_limits(question: Question, environment: Mapping[str, str]) -> Limits:
    """Returns shared memory, locked memory and open files."""
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        memlock_bytes=_limited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        open_files=_limited(soft),
        open_files_hard=_limited(hard),
        is_container=any(Path(mark).exists() for mark in _CONTAINER_MARKS),
    )


def _limited(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def look_space(question: Question, environment: Mapping[str, str]) -> Space:
    """Returns RAM, and the free space of the folders that the run writes."""
    ram = host_memory_bytes()
    return Space(
        ram_bytes=ram,
        available_bytes=min(ram, psutil.virtual_memory().available),
        folders={purpose: folder(Path(name)) for purpose, name in question.folders.items()},
        unreadable=tuple(path for path in question.paths if not os.access(path, os.R_OK)),
    )


def folder(path: Path) -> Folder:
    """Returns a folder, or its nearest parent that is there, with what is free."""
    there = existing(path.expanduser())
    free = shutil.disk_usage(there).free
    return Folder(path=str(path.expanduser()), free_bytes=free, is_writable=os.access(there, os.W_OK))


_NVCC_S = 2.0
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def look_software(question: Question, environment: Mapping[str, str]) -> Software:
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


_INSTALLERS = ("apt-get", "dnf", "yum", "zypper", "pacman", "apk")
_HEADERS = ("/usr/include", "/usr/local/include")
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")


def look_toolchain(question: Question, environment: Mapping[str, str]) -> Toolchain:
    """Returns compilers, headers, and the state of the extensions."""
    path = environment.get("PATH")
    # Source: torch 2.13 utils/cpp_extension.py: get_cxx_compiler
    compiler = shutil.which(environment.get("CXX", "c++").split()[0], path=path) or shutil.which("g++", path=path)
    locked = sorted(lock.parent.name for lock in extension_folder(environment).glob("*/lock"))
    unbuilt = missing_ops(OPS, environment)
    return Toolchain(
        compiler=compiler,
        has_ninja=shutil.which("ninja", path=path) is not None or util.find_spec("ninja") is not None,
        has_python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        has_libaio=_has_libaio(environment),
        has_numactl=shutil.which("numactl", path=path) is not None,
        has_cuda_toolkit=nvcc_path(environment) is not None,
        installer=next((name for name in _INSTALLERS if shutil.which(name, path=path)), None),
        built=tuple(op for op in OPS if op not in unbuilt),
        locks=tuple(unheld_locks(locked, environment)),
        architectures=environment.get("TORCH_CUDA_ARCH_LIST", ""),
    )


def _has_libaio(environment: Mapping[str, str]) -> bool:
    """Returns whether a compiler would find libaio, in the usual folders or where CFLAGS and LDFLAGS point."""
    flags = f"{environment.get('CFLAGS', '')} {environment.get('CXXFLAGS', '')}"
    headers = [*_HEADERS, *re.findall(r"-I\s*(\S+)", flags), *environment.get("CPATH", "").split(":")]
    libraries = [*_LIBRARIES, *re.findall(r"-L\s*(\S+)", environment.get("LDFLAGS", ""))]
    libraries += environment.get("LIBRARY_PATH", "").split(":")
    multiarch = sysconfig.get_config_var("MULTIARCH")
    libraries += [f"{folder}/{multiarch}" for folder in _LIBRARIES] if multiarch else []
    has_header = any((Path(folder) / "libaio.h").is_file() for folder in headers if folder)
    has_library = any((Path(folder) / name).exists() for folder in libraries if folder for name in _NAMES)
    return has_header and has_library


_NAMES = ("libaio.so", "libaio.a")
"""Library that `-laio` looks for."""
