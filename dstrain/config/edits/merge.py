"""Three-way merge of plain values: the last generated ones, the current ones, and the newly generated ones."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Literal

from dstrain.config.jsonc import Pointer


class Mark(Enum):
    """What stands in the place of a value where there is none."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """A key that both sides changed, each in another way."""

    pointer: Pointer
    """The key."""
    base: Any
    """What dstrain wrote before, or REMOVED where it did not."""
    yours: Any
    """What stands there now, or REMOVED."""
    new: Any
    """What dstrain would write now, or REMOVED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What is to be done to your value, and what nobody but you can decide."""

    changes: tuple[Change, ...]
    """In the order in which they must be applied."""
    conflicts: tuple[Clash, ...]
    """Keys that stay as you have them until you decide."""


def merge(
    base: Any, yours: Any, new: Any, *, unsettled: Mapping[Pointer, Any] | None = None, reopens: bool = True
) -> Merged:
    """Returns the merge of three values; objects are merged key by key, lists are taken whole.

    What you did not touch follows `new`, what only you touched stays, and what both changed is a conflict. An object
    that one side removed while the other changed something in it is one conflict, for half a block means nothing.
    `unsettled` are keys of earlier conflicts with what stood there before them; where you alone differ in one of them,
    it is a conflict again if `reopens`.

    >>> merge({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 1}).changes[0]
    Change(pointer=('a',), value=3, after=(), renamed=None, comment=None)
    """
    changes: list[Change] = []
    conflicts: list[Clash] = []
    earlier = unsettled or {}
    for found in _walk((), base, yours, new, earlier if reopens else {}, after=()):
        if isinstance(found, Change):
            changes.append(found)
        else:
            conflicts.append(replace(found, base=earlier.get(found.pointer, found.base)))
    return Merged(changes=tuple(changes), conflicts=tuple(conflicts))


def over_adopted(yours: Any, new: Any) -> Merged:
    """Returns the merge with values that dstrain never wrote: all that it would write otherwise is a conflict, what you
    alone have stays, and only keys for editors (`$schema`) are added unasked.

    >>> [clash.pointer for clash in over_adopted({"a": 1, "b": 1}, {"a": 1, "b": 2, "c": 3}).conflicts]
    [('b',), ('c',)]
    """
    differing = [change for change in merge(yours, yours, new).changes if change.value is not REMOVED]
    changes = tuple(change for change in differing if dotted(change.pointer).startswith("$"))
    conflicts = []
    for change in differing:
        if change not in changes:
            value = lookup(yours, change.pointer)
            conflicts.append(Clash(pointer=change.pointer, base=value, yours=value, new=change.value))
    return Merged(changes=changes, conflicts=tuple(conflicts))


def _walk(
    pointer: Pointer, base: Any, yours: Any, new: Any, unsettled: Collection[Pointer], *, after: tuple[str, ...]
) -> Iterator[Change | Clash]:
    if isinstance(yours, Mapping) and isinstance(new, Mapping):
        inner = base if isinstance(base, Mapping) else {}
        order = list(new)
        for key in dict.fromkeys((*new, *yours, *inner)):
            before = tuple(order[: order.index(key)]) if key in new else ()
            was, has, gets = (each.get(key, REMOVED) for each in (inner, yours, new))
            yield from _walk((*pointer, key), was, has, gets, unsettled, after=before)
    elif same(yours, new):
        return
    elif same(yours, base):
        yield Change(pointer=pointer, value=new, after=after)
    elif not same(new, base) or pointer in unsettled:
        yield Clash(pointer=pointer, base=base, yours=yours, new=new)


def settled(clash: Clash, new: Any) -> Change:
    """Returns the change that gives a conflict dstrain's value; `new` is the whole of what dstrain would write."""
    siblings = lookup(new, clash.pointer[:-1])
    order = list(siblings) if isinstance(siblings, Mapping) else []
    key = clash.pointer[-1] if clash.pointer else None
    return Change(
        pointer=clash.pointer, value=clash.new, after=tuple(order[: order.index(key)]) if key in order else None
    )


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
