"""`.dstrain/lock.json`: what dstrain last generated, from which inputs, so that hand edits are known and never lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import Conflict
from dstrain.facts.cluster import Cluster
from dstrain.paths import write_together
from dstrain.records import load_json, to_json, type_config

LOCK = Path(".dstrain") / "lock.json"
"""Where the lock stands, below the folder of the generated files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What was generated. Machine-owned; commit it beside the files."""

    __pydantic_config__ = type_config

    schema: int = 1
    """Version of this record."""
    dstrain: str
    """Version of dstrain that generated the files."""
    deepspeed: str
    """Version of DeepSpeed installed then, or `none`."""
    template: str
    """DeepSpeed template."""
    template_sha256: str
    """SHA-256 of the template's text."""
    inputs: Mapping[str, Any]
    """The options of gen-config that were typed; paths are relative to the generated files."""
    cluster: Cluster
    """The machines as they were found or assumed then."""
    base: Mapping[str, str]
    """File name to the exact text that was generated."""


def read_lock(folder: Path) -> Lock | None:
    """Returns the lock of a folder, or None where dstrain has generated nothing."""
    path = folder / LOCK
    return load_json(Lock, path) if path.exists() else None


def edited(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Returns the names of files that exist, are not what dstrain last generated, and would be changed by `files`."""
    lock = read_lock(folder)
    base = lock.base if lock else {}
    found = []
    for name, new in files.items():
        path = folder / name
        if not path.exists():
            continue
        known = (base.get(name), new)
        if not path.is_file() or path.read_text(encoding="utf-8", errors="surrogateescape") not in known:
            found.append(name)
    return found


def write_generated(folder: Path, lock: Lock) -> list[str]:
    """Writes the generated files and the lock; returns the names of the files that changed.

    Raises Conflict, before anything is written, when a file was edited by hand or was never dstrain's.
    """
    names = edited(folder, lock.base)
    if names:
        shown = ", ".join(str(folder / name) for name in names)
        raise Conflict(
            f"{shown}: edited by hand since dstrain wrote it, or not written by dstrain; nothing was changed",
            hint=f"See what would change with --diff, write elsewhere with -o DIR, or move your file away:"
            f" mv {folder / names[0]} {folder / names[0]}.mine",
        )
    changed = write_together(
        {**{folder / name: text for name, text in lock.base.items()}, folder / LOCK: to_json(lock)}
    )
    return [name for name in lock.base if folder / name in changed]
