"""Reads and changes values in a JSON document."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from dstrain.config.jsonc import Pointer


class Mark(Enum):
    """A marker in place of a value."""

    REMOVED = "removed"
    """The key is not there, or is to go."""
    UNCHANGED = "unchanged"
    """The value stays as it is."""


REMOVED: Final[Literal[Mark.REMOVED]] = Mark.REMOVED
UNCHANGED: Final[Literal[Mark.UNCHANGED]] = Mark.UNCHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to do to a text; several may come together, as a new name and a new value."""

    pointer: Pointer
    """The key. One that is not there yet is added, with the objects around it."""
    value: Any = UNCHANGED
    """The new value, or REMOVED."""
    after: tuple[str, ...] | None = None
    """For a key that is added: the keys that stand before it where it comes from, in their order. It is put after the
    last of them that is there, or first where none is; None puts it last."""
    renamed: str | None = None
    """The key's new name; no other key of its object may have it."""
    comment: str | None = None
    """The comment at the end of its line, without `#`; "" for none, None for the one that is there. Only for YAML."""


def same(one: Any, other: Any) -> bool:
    """Returns whether two values mean the same; 1 and 1.0 do, 1 and true do not.

    >>> same({"a": [1]}, {"a": [1.0]}), same(1, True)
    (True, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def lookup(value: Any, pointer: Pointer, default: Any = REMOVED) -> Any:
    """Returns what stands at a pointer, or `default`."""
    for key in pointer:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return default
    return value


def applied(value: Any, changes: Sequence[Change]) -> Any:
    """Returns a value with changes made to it; the value itself stays as it is."""
    top = [copy.deepcopy(value)]
    for change in changes:
        if lookup(top[0], change.pointer) is not REMOVED or not isinstance(change.value, Mark):
            _set(top, (0, *change.pointer), change)
    return top[0]


def _set(top: Any, pointer: Pointer, change: Change) -> None:
    for key in pointer[:-1]:
        if isinstance(top, dict) and not isinstance(top.get(key), dict | list):
            top[key] = {}  # what is no object, such as null, cannot hold the key
        top = top[key]
    last: Any = pointer[-1]
    if change.value is REMOVED:
        del top[last]
        return
    if change.value is not UNCHANGED:
        top[last] = copy.deepcopy(change.value)
    if change.renamed is not None:
        kept = [(change.renamed if key == last else key, value) for key, value in top.items()]
        top.clear()
        top.update(kept)


def dotted(pointer: Pointer) -> str:
    """Returns a pointer as people write it.

    >>> dotted(("zero_optimization", "stage"))
    'zero_optimization.stage'
    """
    return ".".join(map(str, pointer)) or "the whole file"
