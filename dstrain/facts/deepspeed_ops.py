"""DeepSpeed's compiled extensions: which ones a configuration needs, and which are built on this machine."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.child_process import open_files
from dstrain.facts.ds_config import ZERO, section
from dstrain.facts.this_machine import user_cache
from dstrain.units import format_seconds

OPS: Mapping[str, str] = MappingProxyType(
    {
        "cpu_adam": "DeepSpeed's CPU Adam",
        "deepspeed_shm_comm": "DeepSpeed's shared-memory collectives",
        "fused_adam": "DeepSpeed's fused Adam",
        "async_io": "DeepSpeed's NVMe reader",
    }
)
"""Extension that DeepSpeed builds on first use → its name in messages."""


def needed_ops(ds_config: Mapping[str, Any], *, on_gpu: bool) -> list[str]:
    """Returns the extensions that a configuration makes DeepSpeed build on first use.

    Source: deepspeed 0.19.8 ops/op_builder; comm/torch.py: build_shm_op; runtime/swap_tensor; runtime/engine.py:
    get_optimizer_configuration.
    """
    zero = section(ds_config, ZERO)
    optimizer = section(zero, "offload_optimizer").get("device", "none")
    params = section(zero, "offload_param").get("device", "none")
    needed = [] if on_gpu else ["deepspeed_shm_comm"]
    if optimizer != "none":
        needed.append("cpu_adam")
    elif str(section(ds_config, "optimizer").get("type", "")).lower() in {"adam", "adamw", "muon"}:
        needed.append("fused_adam")  # with Muon for all that is no matrix of a layer
    if "nvme" in (optimizer, params):
        needed.append("async_io")
    return needed


def torch_folder() -> Path | None:
    """Returns the folder of the PyTorch that this Python would import, without importing it; None if it is missing.

    >>> torch_folder().name
    'torch'
    """
    return _package_folder("torch")


def _package_folder(name: str) -> Path | None:
    spec = util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def torch_build(name: str) -> str | None:
    """Returns a value of `torch/version.py`, such as `cuda` or `hip`; None if PyTorch was built without it."""
    folder = torch_folder()
    with suppress(OSError, AttributeError):
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")  # type: ignore[operator]
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return match[1] if match else None
    return None


def extension_folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder of the extensions that the installed PyTorch has built on first use.

    Source: torch 2.13 utils/cpp_extension.py: _get_build_directory, get_default_build_root.
    """
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    cache = user_cache(environment) / "torch_extensions"
    hip, cuda = torch_build("hip"), torch_build("cuda")
    kind = f"rocm{hip.replace('.', '')}" if hip else f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return cache / f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}_{kind}"


def missing_ops(ops: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Returns the extensions that the ranks would build: those that are missing or built against another PyTorch."""
    folder, shipped = extension_folder(environment), _shipped()
    return [op for op in ops if op not in shipped and not is_built(folder / op)]


def is_built(folder: Path) -> bool:
    """Returns whether PyTorch loads the extension in a folder without a rebuild.

    ninja rebuilds extensions that are older than its rules or PyTorch's headers, or that were built with other paths.
    """
    torch = torch_folder()
    with suppress(OSError):
        rules = (folder / "build.ninja").read_text(encoding="utf-8", errors="replace")
        built = max((path.stat().st_mtime for path in folder.glob("*.so")), default=0.0)
        needed = [folder / "build.ninja", *([torch / "version.py"] if torch else [])]
        is_new = all(built >= path.stat().st_mtime for path in needed)
        return is_new and (torch is None or f"{torch / 'include'}" in rules)
    return False


def _shipped() -> frozenset[str]:
    """Returns the extensions that DeepSpeed was installed with. Source: deepspeed 0.19.8 git_version_info.py."""
    folder = _package_folder("deepspeed")
    if folder is None:
        return frozenset()
    with suppress(OSError, ValueError, SyntaxError):
        text = (folder / "git_version_info_installed.py").read_text(encoding="utf-8")
        match = re.search(r"^installed_ops\s*=\s*(\{.*\})", text, re.MULTILINE)
        installed = ast.literal_eval(match[1]) if match else {}
        return frozenset(name for name, is_installed in installed.items() if is_installed)
    return frozenset()


LOAD_S = 60.0
"""Seconds after which the lock of a built extension is abandoned: loading takes about one."""
BUILD_S = 300.0
"""Seconds without a new file after which a build has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file of an extension that no visible process holds.

    Processes of other containers, and of other machines that share the folder, are not visible.
    """

    path: str
    idle_s: float
    """Seconds since the last write in its folder."""
    is_built: bool
    """Whether the extension is built; the lock was then taken to load it."""

    @property
    def held(self) -> str:
        """The fault, in words."""
        idle = f", and its folder has not changed for {format_seconds(self.idle_s)}" if self.is_stale else ""
        return f"{self.path} is held by no visible process{idle}"

    @property
    def cure(self) -> str:
        """The command that removes the lock."""
        return f"rm {shlex.quote(self.path)}"

    @property
    def is_abandoned(self) -> bool:
        """Whether it is a leftover: the extension is built, and loading takes less time."""
        return self.is_built and self.idle_s >= LOAD_S

    @property
    def is_stale(self) -> bool:
        """Whether ranks would most likely wait for it forever: the build has stopped writing files."""
        return not self.is_built and self.idle_s >= BUILD_S


def unheld_locks(ops: Iterable[str], environment: Mapping[str, str]) -> list[Lock]:
    """Returns the locks of extensions that no visible process holds; builds and loads wait for them without a limit.

    A process that builds or loads keeps its lock file open. Source: torch 2.13 utils/file_baton.py.
    """
    folder = extension_folder(environment)
    locks = [folder / op / "lock" for op in ops if (folder / op / "lock").exists()]
    open_files = held_locks() if locks else frozenset()
    return [_lock(path) for path in locks if path.resolve() not in open_files]


def _lock(path: Path) -> Lock:
    written = 0.0
    for beside in (path, *path.parent.iterdir()):
        with suppress(OSError):
            written = max(written, beside.stat().st_mtime)
    return Lock(path=str(path), idle_s=max(0.0, time.time() - written), is_built=is_built(path.parent))


def held_locks(processes: Iterable[int] | None = None) -> frozenset[Path]:
    """Returns the lock files that these processes have open; by default all processes visible to this user."""
    return frozenset(path for path in open_files(processes) if path.name == "lock")
