"""Probes the compilers for DeepSpeed's extensions, the built ones, and locks left by killed builds."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from dstrain.doctor.facts import Question, Toolchain
from dstrain.doctor.probes.software import nvcc_path
from dstrain.facts.deepspeed_ops import OPS, extension_folder, missing_ops, unheld_locks

_INSTALLERS = ("apt-get", "dnf", "yum", "zypper", "pacman", "apk")
_HEADERS = ("/usr/include", "/usr/local/include")
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")


def look(question: Question, environment: Mapping[str, str]) -> Toolchain:
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
