"""Finds hand edits: the differences between the files and what was last generated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.config.document import REMOVED, dotted, lookup
from dstrain.config.edits import edit
from dstrain.config.edits.lock import Lock, read_lock, standing
from dstrain.config.edits.merge import merge
from dstrain.config.jsonc import Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One key that was changed, added or removed by hand."""

    file: str
    """The name of the file."""
    pointer: Pointer
    """The key."""
    base: Any
    """The generated value, or REMOVED for a key that was added."""
    yours: Any
    """The current value, or REMOVED for a key that was removed."""


def edits_in(name: str, base: str, yours: str, *, shown: str | None = None) -> list[Edit]:
    """Returns the edits of one file, `shown` in messages. Raises InvalidConfig where it cannot be read.

    >>> edits_in("hostfile", "a slots=8\\n", "a slots=4\\n")
    [Edit(file='hostfile', pointer=('a',), base=8, yours=4)]
    """
    was, has = edit.read(base, name), edit.read(yours, shown or name)
    return [
        Edit(file=name, pointer=each.pointer, base=lookup(was, each.pointer), yours=each.value)
        for each in merge(was, was, has).changes
    ]


def manual_edits(folder: Path, lock: Lock) -> list[Edit]:
    """Returns the edits of the files of a folder that are there."""
    there = standing(folder, lock.base)
    return [
        each
        for name, yours in there.items()
        for each in edits_in(name, lock.base[name], yours, shown=str(folder / name))
    ]


def of_run(files: Collection[Path]) -> list[Edit] | None:
    """Returns the edits of the files that a run uses, by the lock in each one's folder; None where there is no lock."""
    found: list[Edit] = []
    locks = {folder: read_lock(folder) for folder in dict.fromkeys(path.parent for path in files)}
    for path in files:
        lock = locks[path.parent]
        if lock is None or path.name not in lock.base:
            continue
        for name, yours in standing(path.parent, [path.name]).items():
            found += edits_in(name, lock.base[name], yours, shown=str(path))
    return found if any(locks.values()) else None


def without_secrets(edits: Sequence[Edit], names: Collection[str]) -> list[Edit]:
    """Returns the edits without environment variables of those names."""
    return [
        Edit(file=each.file, pointer=each.pointer, base=_public(each.base, names), yours=_public(each.yours, names))
        if each.pointer == ("env",)
        else each
        for each in edits
        if each.pointer[:1] != ("env",) or each.pointer[-1] not in names
    ]


def _public(value: Any, names: Collection[str]) -> Any:
    return {key: each for key, each in value.items() if key not in names} if isinstance(value, Mapping) else value


def document(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Returns edits as JSON; a value that is not there has no key."""
    return [
        {
            "file": each.file,
            "key": dotted(each.pointer),
            "pointer": list(each.pointer),
            **values(base=each.base, yours=each.yours),
        }
        for each in edits
    ]


def values(**named: Any) -> dict[str, Any]:
    """Returns the values that are there, by name."""
    return {name: value for name, value in named.items() if value is not REMOVED}
