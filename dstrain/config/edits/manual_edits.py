"""Finds hand edits: the differences between the files and what was last generated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.config.document import REMOVED, dotted, lookup
from dstrain.config.edits import edit
from dstrain.config.edits.lock import Lock, read_lock, standing
from dstrain.config.edits.regenerate import merge
from dstrain.config.jsonc import Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One key that was changed, added or removed by hand."""

    file: str
    pointer: Pointer
    base: Any
    """The generated value, or REMOVED for a key that was added."""
    yours: Any
    """The current value, or REMOVED for a key that was removed."""


def edits_in(name: str, base: str, yours: str, *, shown: str | None = None) -> list[Edit]:
    """Returns the edits of one file, named `shown` in messages. Raises InvalidConfig if the file is unreadable.

    >>> edits_in("hostfile", "a slots=8\\n", "a slots=4\\n")
    [Edit(file='hostfile', pointer=('a',), base=8, yours=4)]
    """
    generated, current = edit.read(base, name), edit.read(yours, shown or name)
    return [
        Edit(file=name, pointer=change.pointer, base=lookup(generated, change.pointer), yours=change.value)
        for change in merge(generated, generated, current).changes
    ]


def manual_edits(folder: Path, lock: Lock) -> list[Edit]:
    """Returns the edits of the existing files of a folder."""
    return [
        item
        for name, yours in standing(folder, lock.base).items()
        for item in edits_in(name, lock.base[name], yours, shown=str(folder / name))
    ]


def of_run(files: Collection[Path]) -> list[Edit] | None:
    """Returns the edits of a run's files according to the locks in their folders; None without any lock."""
    edits: list[Edit] = []
    locks = {folder: read_lock(folder) for folder in dict.fromkeys(path.parent for path in files)}
    for path in files:
        lock = locks[path.parent]
        if lock is None or path.name not in lock.base:
            continue
        for name, yours in standing(path.parent, [path.name]).items():
            edits += edits_in(name, lock.base[name], yours, shown=str(path))
    return edits if any(locks.values()) else None


def without_secrets(edits: Sequence[Edit], names: Collection[str]) -> list[Edit]:
    """Returns the edits without the named environment variables."""
    return [
        replace(item, base=_public(item.base, names), yours=_public(item.yours, names))
        if item.pointer == ("env",)
        else item
        for item in edits
        if item.pointer[:1] != ("env",) or item.pointer[-1] not in names
    ]


def _public(value: Any, names: Collection[str]) -> Any:
    return {key: text for key, text in value.items() if key not in names} if isinstance(value, Mapping) else value


def document(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Returns edits as JSON, without keys for missing values."""
    return [
        {
            "file": item.file,
            "key": dotted(item.pointer),
            "pointer": list(item.pointer),
            **values(base=item.base, yours=item.yours),
        }
        for item in edits
    ]


def values(**named: Any) -> dict[str, Any]:
    """Returns the values that are not REMOVED, by name."""
    return {name: value for name, value in named.items() if value is not REMOVED}
