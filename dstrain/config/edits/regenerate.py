"""Merges newly generated files into edited ones, and returns the texts and the conflicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dstrain.config.document import REMOVED, Change, applied, lookup, same
from dstrain.config.edits import edit, edit_yaml
from dstrain.config.edits.lock import Unsettled
from dstrain.config.edits.merge import Clash, Merged, merge, over_adopted, settled
from dstrain.facts.cluster.hostfile import PLACEHOLDER


class Decision(StrEnum):
    """What is done about a key that both sides changed."""

    OPEN = "open"
    """Your value stays, and you are told."""
    KEEP = "keep"
    """Your value stays."""
    NEW = "new"
    """dstrain's value takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflicting:
    """A conflict, and what was decided."""

    file: str
    """The name of the file."""
    clash: Clash
    """The key and its three values."""
    decision: Decision
    """Whose value stands now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    """What the files become."""

    files: Mapping[str, str]
    """File name to its text."""
    beside: Mapping[str, str]
    """What is written beside them: `NAME.new` with all that dstrain would write, where a conflict is open, `NAME.bak`
    with what stood there, where a value of yours or the whole file is replaced."""
    conflicts: tuple[Conflicting, ...]
    """What both sides changed, decided or not."""
    unsettled: Mapping[str, tuple[Unsettled, ...]]
    """File name to what is open, of this time and of earlier ones."""
    foreign: tuple[str, ...]
    """Files that are there and dstrain knows nothing of; they must not be written."""

    @property
    def open(self) -> tuple[Conflicting, ...]:
        """Conflicts that nobody has decided."""
        return tuple(each for each in self.conflicts if each.decision is Decision.OPEN)


Decide = Callable[[str, Clash], Decision]
"""Takes a file name and a conflict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known of one file."""

    name: str
    """Its name: `ds_config.json`, `job.yaml` or `hostfile`."""
    shown: str
    """The name as people should see it."""
    base: str | None
    """The text last generated, or None."""
    yours: str | None
    """The current text, or None if there is no file."""
    new: str
    """The newly generated text."""
    is_adopted: bool = False
    """Whether `base` is somebody's own text, which dstrain never wrote."""
    unsettled: Collection[Unsettled] = ()
    """Earlier conflicts that are open."""
    reopens: bool = False
    """Whether `decide` is to be asked about them again."""


def regenerate(files: Collection[Standing], decide: Decide) -> Regenerated:
    """Returns what the files become; raises InvalidConfig for one of yours that cannot be read.

    A file that you did not touch, or removed, is written as new; one that was never generated is foreign.
    """
    texts: dict[str, str] = {}
    beside: dict[str, str] = {}
    conflicts: list[Conflicting] = []
    unsettled: dict[str, tuple[Unsettled, ...]] = {}
    foreign = []
    for each in files:
        if each.yours is None or not _is_edited(each):
            texts[each.name] = each.new
        elif each.base is None:
            foreign.append(each.name)
        else:
            merged = _merged(each, each.base, each.yours, decide)
            texts[each.name] = merged.text
            conflicts += merged.conflicts
            decisions = {one.decision for one in merged.conflicts}
            if Decision.OPEN in decisions:
                beside[f"{each.name}.new"] = each.new
            if Decision.NEW in decisions:
                beside[f"{each.name}.bak"] = each.yours
            if merged.unsettled:
                unsettled[each.name] = merged.unsettled
    return Regenerated(
        files=texts, beside=beside, conflicts=tuple(conflicts), unsettled=unsettled, foreign=tuple(foreign)
    )


def replaced(files: Collection[Standing]) -> Regenerated:
    """Returns the files as dstrain would write them; what you edited is kept beside them as `.bak`."""
    return Regenerated(
        files={each.name: each.new for each in files},
        beside={f"{each.name}.bak": each.yours for each in files if each.yours is not None and _is_edited(each)},
        conflicts=(),
        unsettled={},
        foreign=(),
    )


def _is_edited(file: Standing) -> bool:
    """Returns whether what stands there is yours: neither generated earlier nor what would be written now."""
    return file.yours != file.new and (file.is_adopted or file.yours != file.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneMerged:
    """One edited file with dstrain's changes."""

    text: str
    """What it becomes."""
    conflicts: list[Conflicting]
    """What both sides changed."""
    unsettled: tuple[Unsettled, ...]
    """What is open then, earlier conflicts included."""


def _merged(file: Standing, base: str, yours: str, decide: Decide) -> _OneMerged:
    name = file.shown
    has, gets = edit.read(yours, name), edit.read(file.new, name)
    merged = over_adopted(has, gets) if file.is_adopted else _over_generated(file, base, has, gets)
    conflicts = [
        Conflicting(file=file.name, clash=clash, decision=decide(file.name, clash)) for clash in merged.conflicts
    ]
    unsettled = _unsettled(file, conflicts, has, gets)
    taken = [each.clash for each in conflicts if each.decision is Decision.NEW]
    if any(not clash.pointer for clash in taken):
        return _OneMerged(text=file.new, conflicts=conflicts, unsettled=unsettled)
    changes = [*merged.changes, *(settled(clash, gets) for clash in taken)]
    if file.name == "hostfile" and any(each.decision is not Decision.NEW for each in conflicts):
        changes = []
    if file.name.endswith(".yaml") and not file.is_adopted:
        changes = _with_comments(changes, (base, yours, file.new), applied(has, changes), gets)
    return _OneMerged(text=edit.apply(yours, name, changes), conflicts=conflicts, unsettled=unsettled)


def _over_generated(file: Standing, base: str, has: Any, gets: Any) -> Merged:
    was = edit.read(base, file.shown)
    earlier = {each.pointer: each.base[0] if each.base else REMOVED for each in file.unsettled}
    merged = merge(was, has, gets, unsettled=earlier, reopens=file.reopens)
    return _of_hosts(merged, was, has, gets) if file.name == "hostfile" else merged


def _unsettled(file: Standing, conflicts: Collection[Conflicting], has: Any, gets: Any) -> tuple[Unsettled, ...]:
    """Returns the open conflicts: those found now, and earlier ones that were not asked about and still differ."""
    asked = {each.clash.pointer for each in conflicts}
    clashes = [each.clash for each in conflicts if each.decision is Decision.OPEN]
    opened = [Unsettled(pointer=each.pointer, base=() if each.base is REMOVED else (each.base,)) for each in clashes]
    for each in file.unsettled:
        if each.pointer not in asked and not same(lookup(has, each.pointer), lookup(gets, each.pointer)):
            opened.append(each)
    return tuple(sorted(opened, key=str))


def _of_hosts(merged: Merged, base: Mapping[str, Any], yours: Mapping[str, int], new: Mapping[str, int]) -> Merged:
    """Returns the merge of a hostfile, which is one list of machines: a host that dstrain would add to hosts that you
    put in is a conflict, for nobody has said that the two belong together. Placeholders are there to be filled in: as
    many are added as hosts are missing, and none where your hosts have the slots already."""
    if not set(yours) - set(base):
        return merged
    added = [each for each in merged.changes if each.pointer[0] not in yours]
    blanks = [each for each in added if str(each.pointer[0]).startswith(PLACEHOLDER)]
    wanted = blanks[: max(0, len(new) - len(yours))]
    is_full = blanks == added and sum(yours.values()) == sum(new.values())
    doubtful = [] if is_full else [each for each in added if each not in wanted]
    clashes = [Clash(pointer=each.pointer, base=REMOVED, yours=REMOVED, new=each.value) for each in doubtful]
    left_out = added if is_full else doubtful
    changes = tuple(each for each in merged.changes if each not in left_out)
    return Merged(changes=changes, conflicts=(*merged.conflicts, *clashes))


def _with_comments(changes: list[Change], texts: tuple[str, str, str], value: Any, gets: Any) -> list[Change]:
    """Returns the changes of a YAML text with those of comments at the ends of lines that you did not touch: they
    follow the new text where the line's value does (`grad_accum: 8  # 64 samples a step`), and go with its key."""
    base, yours, new = (edit_yaml.comments(text.removeprefix("\ufeff")) for text in texts)
    gone = [each.pointer for each in changes if each.value is REMOVED]
    before, after = [], []
    for pointer in dict.fromkeys((*base, *new)):
        was, has, gets_ = (each.get(pointer, "") for each in (base, yours, new))
        if has != was:
            continue
        if any(pointer[: len(each)] == each for each in gone):
            before.append(Change(pointer=pointer, comment=""))
        elif (
            gets_ != was
            and lookup(value, pointer) is not REMOVED
            and same(lookup(value, pointer), lookup(gets, pointer))
        ):
            after.append(Change(pointer=pointer, comment=gets_))
    return [*before, *changes, *after]
