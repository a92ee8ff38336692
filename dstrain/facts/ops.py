"""DeepSpeed's compiled extensions: which ones a configuration needs, and whether they are built on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

OPS: Mapping[str, str] = MappingProxyType(
    {
        "cpu_adam": "DeepSpeed's CPU Adam",
        "deepspeed_shm_comm": "DeepSpeed's shared-memory collectives",
        "fused_adam": "DeepSpeed's fused Adam",
        "async_io": "DeepSpeed's NVMe reader",
    }
)
"""Extension that is built on first use → what it is, for people."""


def needed_ops(ds_config: Mapping[str, Any], *, on_gpu: bool) -> list[str]:
    """Returns the extensions that a configuration makes DeepSpeed build on first use.

    Source: deepspeed 0.19.8 ops/op_builder; comm/torch.py: build_shm_op; runtime/swap_tensor.
    """
    zero = _section(ds_config, "zero_optimization")
    optimizer = _section(zero, "offload_optimizer").get("device", "none")
    params = _section(zero, "offload_param").get("device", "none")
    needed = [] if on_gpu else ["deepspeed_shm_comm"]
    if optimizer != "none":
        needed.append("cpu_adam")
    elif str(_section(ds_config, "optimizer").get("type", "")).lower() in {"adam", "adamw"}:
        needed.append("fused_adam")
    if "nvme" in (optimizer, params):
        needed.append("async_io")
    return needed


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object under a key; an empty one where there is none, or something else."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def extension_folders(environment: Mapping[str, str]) -> list[Path]:
    """Returns the folders in which PyTorch may keep extensions that were built on first use.

    Source: torch 2.13 utils/cpp_extension.py: _get_build_directory.
    """
    given = environment.get("TORCH_EXTENSIONS_DIR")
    if given:
        return [Path(given)]
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    return sorted(cache.glob("py*"))


def missing_ops(ops: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns those of the extensions that are not built yet."""
    folders = extension_folders(environment)
    return [op for op in ops if not any(any(folder.glob(f"{op}/*.so")) for folder in folders)]


def stale_locks(ops: Sequence[str], environment: Mapping[str, str]) -> list[Path]:
    """Returns locks that killed builds left behind; the next run would wait for them for ever.

    A build that is alive keeps its lock open. Source: torch 2.13 utils/file_baton.py.
    """
    locks = [folder / op / "lock" for folder in extension_folders(environment) for op in ops]
    present = [lock for lock in locks if lock.exists()]
    held = _open_files() if present else frozenset()
    return [lock for lock in present if str(lock.resolve()) not in held]


def _open_files() -> frozenset[str]:
    """Returns the files that processes of this machine have open, as far as this user may see."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    return frozenset(found)
