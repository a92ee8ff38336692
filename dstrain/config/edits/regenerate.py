"""Finds hand edits of generated files, and merges newly generated files into edited ones, value by value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from dstrain.config.edits import edit
from dstrain.config.edits.lock import Lock, Unsettled, read_lock, standing
from dstrain.config.jsonc import REMOVED, Change, Pointer, applied, dotted, lookup, same
from dstrain.facts.cluster.hostfile import PLACEHOLDER


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


class Decision(StrEnum):
    """The resolution of a conflict."""

    OPEN = "open"
    """Your value stays, and the conflict is reported."""
    KEEP = "keep"
    """Your value stays."""
    NEW = "new"
    """dstrain's value replaces yours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflicting:
    """A conflict and its resolution."""

    file: str
    clash: Clash
    """The key and its three values."""
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    """The new texts of the files."""

    files: Mapping[str, str]
    """File name → text."""
    beside: Mapping[str, str]
    """Additional files: `NAME.new` with the generated text if a conflict is open, `NAME.bak` with the previous text if
    one of your values or the whole file is replaced."""
    conflicts: tuple[Conflicting, ...]
    """All conflicts, decided or not."""
    unsettled: Mapping[str, tuple[Unsettled, ...]]
    """File name → open conflicts, new and earlier ones."""
    foreign: tuple[str, ...]
    """Existing files that dstrain never generated; they must not be overwritten."""

    @property
    def open(self) -> tuple[Conflicting, ...]:
        """Undecided conflicts."""
        return tuple(conflict for conflict in self.conflicts if conflict.decision is Decision.OPEN)


Decide = Callable[[str, Clash], Decision]
"""Takes a file name and a conflict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One file: its generated, current and newly generated text."""

    name: str
    """`ds_config.json`, `job.yaml` or `hostfile`."""
    shown: str
    """The file's name in messages."""
    base: str | None
    """The text last generated, or None."""
    yours: str | None
    """The current text, or None if there is no file."""
    new: str
    """The newly generated text."""
    is_adopted: bool = False
    """Whether `base` is a text that dstrain never wrote."""
    unsettled: Collection[Unsettled] = ()
    """Earlier conflicts that are still open."""
    reopens: bool = False
    """Whether to ask `decide` about them again."""


def regenerate(files: Collection[Standing], decide: Decide) -> Regenerated:
    """Returns the new texts of the files; raises InvalidConfig if one of yours is unreadable.

    A file that you did not change, or removed, gets the new text; one that was never generated is foreign.
    """
    texts: dict[str, str] = {}
    beside: dict[str, str] = {}
    conflicts: list[Conflicting] = []
    unsettled: dict[str, tuple[Unsettled, ...]] = {}
    foreign = []
    for file in files:
        if file.yours is None or not _is_edited(file):
            texts[file.name] = file.new
        elif file.base is None:
            foreign.append(file.name)
        else:
            merged = _merged(file, file.base, file.yours, decide)
            texts[file.name] = merged.text
            conflicts += merged.conflicts
            decisions = {conflict.decision for conflict in merged.conflicts}
            if Decision.OPEN in decisions:
                # kept beside, so that no conflict loses either side
                beside[f"{file.name}.new"] = file.new
            if Decision.NEW in decisions:
                beside[f"{file.name}.bak"] = file.yours
            if merged.unsettled:
                unsettled[file.name] = merged.unsettled
    return Regenerated(
        files=texts, beside=beside, conflicts=tuple(conflicts), unsettled=unsettled, foreign=tuple(foreign)
    )


def replaced(files: Collection[Standing]) -> Regenerated:
    """Returns the newly generated files; edited ones are kept as `.bak`."""
    return Regenerated(
        files={file.name: file.new for file in files},
        beside={f"{file.name}.bak": file.yours for file in files if file.yours is not None and _is_edited(file)},
        conflicts=(),
        unsettled={},
        foreign=(),
    )


def _is_edited(file: Standing) -> bool:
    """Returns whether the current text differs from the last generated one and from the new one."""
    return file.yours != file.new and (file.is_adopted or file.yours != file.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneMerged:
    """One edited file with dstrain's changes."""

    text: str
    conflicts: list[Conflicting]
    unsettled: tuple[Unsettled, ...]
    """Conflicts that remain open, including earlier ones."""


def _merged(file: Standing, base: str, yours: str, decide: Decide) -> _OneMerged:
    name = file.shown
    has, gets = edit.read(yours, name), edit.read(file.new, name)
    merged = over_adopted(has, gets) if file.is_adopted else _over_generated(file, base, has, gets)
    conflicts = [
        Conflicting(file=file.name, clash=clash, decision=decide(file.name, clash)) for clash in merged.conflicts
    ]
    unsettled = _unsettled(file, conflicts, has, gets)
    overruled = [conflict.clash for conflict in conflicts if conflict.decision is Decision.NEW]
    if any(not clash.pointer for clash in overruled):
        return _OneMerged(text=file.new, conflicts=conflicts, unsettled=unsettled)
    changes = [*merged.changes, *(settled(clash, gets) for clash in overruled)]
    if file.name == "hostfile" and len(overruled) < len(conflicts):
        changes = []
    if file.name.endswith(".yaml") and not file.is_adopted:
        changes = _with_comments(changes, (base, yours, file.new), applied(has, changes), gets)
    return _OneMerged(text=edit.apply(yours, name, changes), conflicts=conflicts, unsettled=unsettled)


def _over_generated(file: Standing, base: str, has: Any, gets: Any) -> Merged:
    was = edit.read(base, file.shown)
    earlier = {conflict.pointer: conflict.base[0] if conflict.base else REMOVED for conflict in file.unsettled}
    merged = merge(was, has, gets, unsettled=earlier, reopens=file.reopens)
    return _of_hosts(merged, was, has, gets) if file.name == "hostfile" else merged


def _unsettled(file: Standing, conflicts: Collection[Conflicting], has: Any, gets: Any) -> tuple[Unsettled, ...]:
    """Returns the open conflicts: new ones, and earlier ones that were not asked about and still differ."""
    asked = {conflict.clash.pointer for conflict in conflicts}
    clashes = [conflict.clash for conflict in conflicts if conflict.decision is Decision.OPEN]
    unsettled = [
        Unsettled(pointer=clash.pointer, base=() if clash.base is REMOVED else (clash.base,)) for clash in clashes
    ]
    unsettled += [
        earlier
        for earlier in file.unsettled
        if earlier.pointer not in asked and not same(lookup(has, earlier.pointer), lookup(gets, earlier.pointer))
    ]
    return tuple(sorted(unsettled, key=str))


def _of_hosts(merged: Merged, base: Mapping[str, Any], yours: Mapping[str, int], new: Mapping[str, int]) -> Merged:
    """Returns the merge of a hostfile, which lists the machines of one cluster.

    A host that dstrain would add to your own hosts is a conflict, because they may not belong together. Placeholders
    are added for missing hosts, unless your hosts have all the slots.
    """
    if not set(yours) - set(base):
        return merged
    added = [change for change in merged.changes if change.pointer[0] not in yours]
    placeholders = [change for change in added if str(change.pointer[0]).startswith(PLACEHOLDER)]
    needed = placeholders[: max(0, len(new) - len(yours))]
    is_full = placeholders == added and sum(yours.values()) == sum(new.values())
    doubtful = [] if is_full else [change for change in added if change not in needed]
    clashes = [Clash(pointer=change.pointer, base=REMOVED, yours=REMOVED, new=change.value) for change in doubtful]
    omitted = added if is_full else doubtful
    changes = tuple(change for change in merged.changes if change not in omitted)
    return Merged(changes=changes, conflicts=(*merged.conflicts, *clashes))


def _with_comments(changes: list[Change], texts: tuple[str, str, str], value: Any, gets: Any) -> list[Change]:
    """Returns the changes of a YAML text and of its line-end comments that you did not edit: a comment follows the new
    text if the value does (`grad_accum: 8  # micro-batches`), and is removed with its key."""
    base, yours, new = (edit.comments(text.removeprefix("\ufeff")) for text in texts)
    removed = [change.pointer for change in changes if change.value is REMOVED]
    before, after = [], []
    for pointer in dict.fromkeys((*base, *new)):
        comment, current = new.get(pointer, ""), lookup(value, pointer)
        if yours.get(pointer, "") != base.get(pointer, ""):
            continue
        if any(pointer[: len(outer)] == outer for outer in removed):
            before.append(Change(pointer=pointer, comment=""))
        elif comment != base.get(pointer, "") and current is not REMOVED and same(current, lookup(gets, pointer)):
            after.append(Change(pointer=pointer, comment=comment))
    return [*before, *changes, *after]


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
