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
    """The key is missing, or is to be removed."""
    UNCHANGED = "unchanged"
    """The value stays as it is."""


REMOVED: Final[Literal[Mark.REMOVED]] = Mark.REMOVED
UNCHANGED: Final[Literal[Mark.UNCHANGED]] = Mark.UNCHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one key: a new value, a new name, a new comment, or several of these."""

    pointer: Pointer
    """The key; a missing one is added, with the objects around it."""
    value: Any = UNCHANGED
    """The new value, or REMOVED."""
    after: tuple[str, ...] | None = None
    """For an added key: the keys that precede it in its source, in order. It is inserted after the last of them that
    exists, or first if none does; None appends it."""
    renamed: str | None = None
    """The key's new name, which no other key of its object may have."""
    comment: str | None = None
    """The comment at the end of its line, without `#`; "" removes it, None keeps it. Only for YAML."""


def same(one: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal; 1 equals 1.0, 1 does not equal true.

    >>> same({"a": [1]}, {"a": [1.0]}), same(1, True)
    (True, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def lookup(value: Any, pointer: Pointer, default: Any = REMOVED) -> Any:
    """Returns the value at a pointer, or `default`."""
    for key in pointer:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return default
    return value


def applied(value: Any, changes: Sequence[Change]) -> Any:
    """Returns a changed copy of a value."""
    top = [copy.deepcopy(value)]
    for change in changes:
        if lookup(top[0], change.pointer) is not REMOVED or not isinstance(change.value, Mark):
            _set(top, (0, *change.pointer), change)
    return top[0]


def _set(top: Any, pointer: Pointer, change: Change) -> None:
    for key in pointer[:-1]:
        if isinstance(top, dict) and not isinstance(top.get(key), dict | list):
            top[key] = {}  # other values, such as null, cannot contain the key
        top = top[key]
    last: Any = pointer[-1]
    if change.value is REMOVED:
        del top[last]
        return
    if change.value is not UNCHANGED:
        top[last] = copy.deepcopy(change.value)
    if change.renamed is not None:
        items = [(change.renamed if key == last else key, value) for key, value in top.items()]
        top.clear()
        top.update(items)


def dotted(pointer: Pointer) -> str:
    """Returns a pointer in dotted form.

    >>> dotted(("zero_optimization", "stage"))
    'zero_optimization.stage'
    """
    return ".".join(map(str, pointer)) or "the whole file"
