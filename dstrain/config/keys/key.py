"""The record of one key of a DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The JSON type of a value."""

    BOOL = "true or false"
    INT = "whole number"
    NUMBER = "number"
    TEXT = "text"
    OBJECT = "object"
    LIST = "list"
    ANY = "any value"


class Names(StrEnum):
    """What the engine does with a name inside an object that it does not know."""

    REFUSED = "refused"
    """It raises."""
    IGNORED = "ignored"
    """It reads on, as if nothing stood there."""
    FREE = "free"
    """It passes everything on: any name may be meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the engine's configuration, as releases 0.16 to 0.19 read it."""

    path: str
    """Names from the top, joined by dots; `*` stands for any name or list index."""
    kind: Kind
    """The type of its value."""
    default: Any = None
    """What the engine takes where the key is missing; None: nothing."""
    default_note: str | None = None
    """The default in words, where it depends on something."""
    least: float | None = None
    """The smallest legal number."""
    most: float | None = None
    """The largest legal number."""
    above: float | None = None
    """The number that a legal one is above."""
    below: float | None = None
    """The number that a legal one is below."""
    words: tuple[str, ...] = ()
    """Legal texts: all of them where the kind is TEXT, beside the kind's own values elsewhere."""
    is_nullable: bool = False
    """Whether null may stand there."""
    names: Names = Names.REFUSED
    """For objects: what happens to names that are not in this table."""
    meaning: str
    """What it does, in a sentence or two, with its unit."""
    filled: str | None = None
    """The Trainer's argument, or the formula, that replaces "auto"; None: nothing fills it."""
    since: str | None = None
    """The release that brought it; None: there since 0.16.0 or longer."""
    removed: str | None = None
    """The first release without it; None: 0.19.8 has it."""
    alias_of: str | None = None
    """The path of the key that this one is another name of."""
    instead: str | None = None
    """What to write in its place, where it is removed or deprecated."""
    source: str
    """File and symbol, below `deepspeed/` of 0.19.8 (or of the last release that had it)."""
