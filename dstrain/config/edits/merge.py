"""Three-way merge of plain values: last generated, current, and newly generated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.config.document import REMOVED, Change, dotted, lookup, same
from dstrain.config.jsonc import Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """A key that both sides changed, each in another way."""

    pointer: Pointer
    """The key."""
    base: Any
    """The value last generated, or REMOVED if there was none."""
    yours: Any
    """The current value, or REMOVED."""
    new: Any
    """The newly generated value, or REMOVED."""


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
