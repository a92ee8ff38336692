"""What DeepSpeed's extensions are built with on first use, which are built, and locks of builds that were killed."""

from __future__ import annotations

import ast
import re
import shutil
import sysconfig
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from dstrain.facts.ops import OPS, extension_folders, missing_ops, stale_locks
from dstrain.launch.doctor.facts import Question, Toolchain
from dstrain.launch.doctor.looks.software import nvcc_path

_INSTALLERS = ("apt-get", "dnf", "yum", "zypper", "pacman", "apk")
_HEADERS = ("/usr/include", "/usr/local/include")
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")


def look(question: Question, environment: Mapping[str, str]) -> Toolchain:
    """Returns compilers, headers, and the state of the extensions."""
    path = environment.get("PATH")
    # Source: torch 2.13 utils/cpp_extension.py: get_cxx_compiler
    compiler = shutil.which(environment.get("CXX", "c++").split()[0], path=path) or shutil.which("g++", path=path)
    folders = extension_folders(environment)
    locked = sorted({lock.parent.name for folder in folders for lock in folder.glob("*/lock")})
    unbuilt = set(missing_ops(list(OPS), environment)) - _shipped()
    return Toolchain(
        compiler=compiler,
        has_ninja=shutil.which("ninja", path=path) is not None or util.find_spec("ninja") is not None,
        has_python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        has_libaio=_has_libaio(environment),
        has_cuda_toolkit=nvcc_path(environment) is not None,
        installer=next((name for name in _INSTALLERS if shutil.which(name, path=path)), None),
        folder=str(folders[-1] if folders else Path.home() / ".cache" / "torch_extensions"),
        built=tuple(op for op in OPS if op not in unbuilt),
        stale_locks=tuple(map(str, stale_locks(locked, environment))),
    )


def _shipped() -> set[str]:
    """Returns the extensions that DeepSpeed was installed with. Source: deepspeed 0.19.8 git_version_info.py."""
    found = util.find_spec("deepspeed")
    if found is None or found.origin is None:
        return set()
    file = Path(found.origin).parent / "git_version_info_installed.py"
    if not file.is_file():
        return set()
    match = re.search(r"^installed_ops\s*=\s*(\{.*\})", file.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        listed = ast.literal_eval(match[1]) if match else {}
    except (ValueError, SyntaxError):
        return set()
    return {name for name, is_there in listed.items() if is_there}


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
"""What `-laio` looks for."""
