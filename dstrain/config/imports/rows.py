"""One row for each key of another tool: what it becomes in a job, or why it becomes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dstrain.config.document import REMOVED

if TYPE_CHECKING:
    from dstrain.config.imports.source import Source

ABSENT: Any = REMOVED
"""In place of a value: nothing is given, or nothing is to be written."""


class Fate(StrEnum):
    """What becomes of a key."""

    WRITTEN = "written"
    """It has a counterpart, which is written."""
    NEEDLESS = "needless"
    """dstrain does without it: the training is the same."""
    MISSING = "missing"
    """It has no counterpart; the training is the same except for this."""
    OTHER_TRAINING = "other training"
    """It has no counterpart, and without it something else would be trained: the import stops."""
    CHANGED = "changed"
    """It has a counterpart that differs in something."""
    UNKNOWN = "unknown"
    """The table has no such key."""
    UNREAD = "not read"
    """It is in the file, and not part of what is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a converter returns if one value alone does not say it."""

    values: Mapping[str, Any]
    """Target → value."""
    note: str = ""
    """How the counterpart differs, and what to do."""


READ = Converted(values={})
"""What a converter returns for a value that is no key of its own: another key is written by it, or nothing need be."""


class Unmatched(Exception):
    """A value without counterpart; the text says what to do."""

    fate = Fate.MISSING


class OtherTraining(Unmatched):
    """A value without which something else would be trained."""

    fate = Fate.OTHER_TRAINING


Convert = Callable[[Any, "Source"], Any]
"""Takes a value and all settings; returns the value for the target, `Converted`, READ, or ABSENT to write nothing,
which the page says of a value that asks for something. Raises Unmatched, or InvalidConfig for a value that the tool
itself would refuse."""


def same(value: Any, _: Source) -> Any:
    """Returns the value as it is."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of another tool."""

    key: str
    """Its name there; `section.key` inside a section."""
    fate: Fate
    target: str = ""
    """A key of job.yaml (`lora.rank` reaches inside), `plan.X` for a choice of gen-config, or `machines.X`."""
    convert: Convert = same
    default: Any = ABSENT
    """What the tool takes if the key is absent, in its own terms."""
    note: str = ""
    """What to do instead, or why nothing is needed."""
    unless: tuple[Any, ...] = (False,)
    """Values that mean the same as an absent key."""


def to(key: str, target: str, convert: Convert = same, *, default: Any = ABSENT, note: str = "") -> Row:
    """Returns the row of a key that has a counterpart."""
    return Row(key=key, fate=Fate.WRITTEN, target=target, convert=convert, default=default, note=note, unless=())


def read_with(keys: str, other: str) -> tuple[Row, ...]:
    """Returns the rows of keys that are read together with another one; without that they ask for nothing."""

    def convert(_: Any, source: Source) -> Any:
        return ABSENT if source.value(other, ABSENT) is ABSENT else READ

    return tuple(
        Row(key=key, fate=Fate.WRITTEN, convert=convert, note=f"read with `{other}`", unless=()) for key in keys.split()
    )


def needless(keys: str, why: str) -> tuple[Row, ...]:
    """Returns the rows of keys that dstrain does without."""
    return tuple(Row(key=key, fate=Fate.NEEDLESS, note=why, unless=()) for key in keys.split())


def lacks(keys: str, instead: str, *, unless: tuple[Any, ...] = (False,)) -> tuple[Row, ...]:
    """Returns the rows of keys without counterpart; the training is the same except for them."""
    return tuple(Row(key=key, fate=Fate.MISSING, note=instead, unless=unless) for key in keys.split())


def stops(keys: str, why: str, *, unless: tuple[Any, ...] = (False,)) -> tuple[Row, ...]:
    """Returns the rows of keys that make another training."""
    return tuple(Row(key=key, fate=Fate.OTHER_TRAINING, note=why, unless=unless) for key in keys.split())


def inside(section: str, keys: str) -> str:
    """Returns keys of a section as rows name them.

    >>> inside("fsdp_config", "a b")
    'fsdp_config.a fsdp_config.b'
    """
    return " ".join(f"{section}.{key}" for key in keys.split())


def table(*parts: Row | Sequence[Row]) -> Mapping[str, Row]:
    """Returns rows by key; a later row replaces an earlier one of the same key."""
    rows = [row for part in parts for row in ([part] if isinstance(part, Row) else part)]
    return {row.key: row for row in rows}
