"""Three-way merge of plain values: last generated, current, and newly generated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.config.document import REMOVED, Change, dotted, lookup, same
from dstrain.config.jsonc import Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """A key that both sides changed differently."""

    pointer: Pointer
    base: Any
    """The value last generated, or REMOVED if there was none."""
    yours: Any
    """The current value, or REMOVED."""
    new: Any
    """The newly generated value, or REMOVED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The changes of your value, and the conflicts that you must decide."""

    changes: tuple[Change, ...]
    """In the order in which they must be applied."""
    conflicts: tuple[Clash, ...]
    """Keys that keep your value until you decide."""


def merge(
    base: Any, yours: Any, new: Any, *, unsettled: Mapping[Pointer, Any] | None = None, reopens: bool = True
) -> Merged:
    """Returns the merge of three values; objects are merged key by key, lists as a whole.

    Keys that you did not change follow `new`, keys that only you changed stay, and keys that both changed are
    conflicts. An object that one side removed and the other changed is a single conflict. `unsettled` maps keys of
    earlier conflicts to their values before the conflict; if only you differ in one of them, it is a conflict again if
    `reopens`.

    >>> merge({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 1}).changes[0]
    Change(pointer=('a',), value=3, after=(), renamed=None, comment=None)
    """
    changes: list[Change] = []
    conflicts: list[Clash] = []
    earlier = unsettled or {}
    for difference in _walk((), base, yours, new, earlier if reopens else {}, after=()):
        if isinstance(difference, Change):
            changes.append(difference)
        else:
            conflicts.append(replace(difference, base=earlier.get(difference.pointer, difference.base)))
    return Merged(changes=tuple(changes), conflicts=tuple(conflicts))


def over_adopted(yours: Any, new: Any) -> Merged:
    """Returns the merge with values that dstrain never wrote: each key that it would write differently is a conflict,
    keys that only you have stay, and only keys for editors (`$schema`) are added without asking.

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
            one, two, three = (side.get(key, REMOVED) for side in (inner, yours, new))
            yield from _walk((*pointer, key), one, two, three, unsettled, after=before)
    elif same(yours, new):
        return
    elif same(yours, base):
        yield Change(pointer=pointer, value=new, after=after)
    elif not same(new, base) or pointer in unsettled:
        yield Clash(pointer=pointer, base=base, yours=yours, new=new)


def settled(clash: Clash, new: Any) -> Change:
    """Returns the change that resolves a conflict with dstrain's value; `new` is the whole generated value."""
    siblings = lookup(new, clash.pointer[:-1])
    order = list(siblings) if isinstance(siblings, Mapping) else []
    key = clash.pointer[-1] if clash.pointer else None
    return Change(
        pointer=clash.pointer, value=clash.new, after=tuple(order[: order.index(key)]) if key in order else None
    )
