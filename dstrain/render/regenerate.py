"""Generated files over edited ones: texts in, merged texts and conflicts out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dstrain.facts.hostfile import PLACEHOLDER
from dstrain.render import edit, edit_yaml
from dstrain.render.jsonc import Pointer
from dstrain.render.merge import REMOVED, Change, Clash, Merged, applied, lookup, merge, same, settled


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
    with what stood there, where your file was replaced."""
    conflicts: tuple[Conflicting, ...]
    """What both sides changed, decided or not."""
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
    """What dstrain last generated, or None."""
    yours: str | None
    """What stands there, or None."""
    new: str
    """What dstrain would write."""
    unsettled: Collection[Pointer]
    """Keys of earlier conflicts that are open and that `decide` is to be asked about again."""


def regenerate(files: Collection[Standing], decide: Decide) -> Regenerated:
    """Returns what the files become; raises InvalidConfig for one of yours that cannot be read.

    A file that you did not touch, or removed, is written as new; one that was never generated is foreign.
    """
    texts: dict[str, str] = {}
    beside: dict[str, str] = {}
    conflicts: list[Conflicting] = []
    foreign = []
    for each in files:
        if each.yours is None or each.yours in (each.base, each.new):
            texts[each.name] = each.new
        elif each.base is None:
            foreign.append(each.name)
        else:
            texts[each.name], found = _merged(each, each.base, each.yours, decide)
            conflicts += found
            if any(one.decision is Decision.OPEN for one in found):
                beside[f"{each.name}.new"] = each.new
    return Regenerated(files=texts, beside=beside, conflicts=tuple(conflicts), foreign=tuple(foreign))


def replaced(files: Collection[Standing]) -> Regenerated:
    """Returns the files as dstrain would write them; what you edited is kept beside them as `.bak`."""
    edited = {each.name: each.yours for each in files if each.yours not in (None, each.base, each.new)}
    return Regenerated(
        files={each.name: each.new for each in files},
        beside={f"{name}.bak": text for name, text in edited.items() if text is not None},
        conflicts=(),
        foreign=(),
    )


def unsettled(found: Regenerated, earlier: Mapping[str, Collection[Pointer]]) -> dict[str, tuple[Pointer, ...]]:
    """Returns the keys of open conflicts by file: those found now, and earlier ones that were not asked about."""
    open_now = {(each.file, each.clash.pointer) for each in found.open}
    asked = {(each.file, each.clash.pointer) for each in found.conflicts}
    old = {(name, tuple(pointer)) for name, pointers in earlier.items() for pointer in pointers}
    left = sorted(open_now | (old - asked), key=str)
    return {name: tuple(pointer for file, pointer in left if file == name) for name in sorted({n for n, _ in left})}


def _merged(file: Standing, base: str, yours: str, decide: Decide) -> tuple[str, list[Conflicting]]:
    """Returns one edited file with dstrain's changes, and its conflicts."""
    name = file.shown
    was, has, gets = edit.read(base, name), edit.read(yours, name), edit.read(file.new, name)
    merged = merge(was, has, gets, unsettled=file.unsettled)
    if file.name == "hostfile":
        merged = _of_hosts(merged, was, has)
    conflicts = [
        Conflicting(file=file.name, clash=clash, decision=decide(file.name, clash)) for clash in merged.conflicts
    ]
    taken = [each.clash for each in conflicts if each.decision is Decision.NEW]
    if any(not clash.pointer for clash in taken):
        return file.new, conflicts
    changes = [*merged.changes, *(settled(clash, gets) for clash in taken)]
    if file.name == "hostfile" and any(each.decision is not Decision.NEW for each in conflicts):
        changes = []
    if file.name.endswith(".yaml"):
        changes = _with_comments(changes, (base, yours, file.new), applied(has, changes), gets)
    return edit.apply(yours, name, changes), conflicts


def _of_hosts(merged: Merged, base: Mapping[str, Any], yours: Mapping[str, Any]) -> Merged:
    """Returns the merge of a hostfile, which is one list of machines: a host that dstrain would add to hosts that you
    put in is a conflict, for nobody has said that the two belong together. Placeholders are there to be filled in."""
    if not set(yours) - set(base):
        return merged
    doubtful = [
        each
        for each in merged.changes
        if each.pointer[0] not in yours and not str(each.pointer[0]).startswith(PLACEHOLDER)
    ]
    clashes = [Clash(pointer=each.pointer, base=REMOVED, yours=REMOVED, new=each.value) for each in doubtful]
    changes = tuple(each for each in merged.changes if each not in doubtful)
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
