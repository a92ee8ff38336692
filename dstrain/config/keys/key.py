"""The record of one key of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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


BOOL, INT, NUMBER, TEXT, OBJECT, LIST, ANY = Kind


class Names(StrEnum):
    """Reaction of the engine to an unknown name inside an object."""

    REFUSED = "refused"
    """It raises."""
    IGNORED = "ignored"
    """It ignores the name."""
    FREE = "free"
    """It passes every name on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the engine's configuration, as releases 0.16 to 0.19 read it."""

    path: str
    """Names from the top, joined by dots; `*` stands for any name or list index."""
    kind: Kind
    """The type of its value."""
    default: Any = None
    """The engine's value if the key is missing; None: no value."""
    default_note: str | None = None
    """The default in words, if it depends on something."""
    least: float | None = None
    """Inclusive lower bound."""
    most: float | None = None
    """Inclusive upper bound."""
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    words: tuple[str, ...] = ()
    """Legal texts: all of them if the kind is TEXT, otherwise those allowed besides the kind's own values."""
    is_nullable: bool = False
    """Whether null is legal."""
    names: Names = Names.REFUSED
    """For objects: the reaction of the engine to names outside this table."""
    meaning: str
    """Effect in a sentence or two, with its unit."""
    stages: tuple[int, ...] = ()
    """The ZeRO stages that read it; empty: the stage does not matter."""
    is_switch: bool = False
    """Whether it enables the section around it."""
    filled: str | None = None
    """The Trainer's argument, or the formula, that replaces "auto"; None: nothing fills it."""
    since: str | None = None
    """The release that introduced it; None: 0.16.0 or earlier."""
    removed: str | None = None
    """The first release without it; None: 0.19.8 has it."""
    alias_of: str | None = None
    """The path of the key that this one is another name of."""
    instead: str | None = None
    """Replacement of a removed or deprecated key."""
    source: str
    """File and symbol, below `deepspeed/` of 0.19.8 (or of the last release that had it)."""


def row(name: str, kind: Kind, meaning: str, **facts: Any) -> Key:
    """Returns the row of a key, named from the object that contains it; `within` completes path and source."""
    return Key(**{"path": name, "kind": kind, "meaning": meaning, "source": "", **facts})


def flag(name: str, meaning: str, **facts: Any) -> Key:
    """Returns the row of a boolean that is false by default."""
    return row(name, Kind.BOOL, meaning, **{"default": False, **facts})


def switch(meaning: str = "Enables the section.", **facts: Any) -> Key:
    """Returns the row of the key that enables its section."""
    return flag("enabled", meaning, is_switch=True, **facts)


def also(key: Key, name: str) -> tuple[Key, Key]:
    """Returns the row of a key and the row of its other name."""
    other = replace(key, path=name, alias_of=key.path, filled=None, meaning=f"Another name of {key.path}.", stages=())
    return key, other


def within(path: str, source: str, **shared: Any) -> Callable[..., tuple[Key, ...]]:
    """Returns a function that completes the rows of an object: paths, the source unless a row has its own, and shared
    facts that a row leaves at their defaults.

    >>> within("aio", "runtime/swap_tensor", since="0.17.0")(flag("use_gds", "Skips host memory."))[0].path
    'aio.use_gds'
    """
    prefix = f"{path}." if path else ""
    defaults = {field.name: field.default for field in fields(Key)}

    def complete(*rows: Key) -> tuple[Key, ...]:
        return tuple(
            replace(
                key,
                path=prefix + key.path,
                source=key.source or source,
                alias_of=key.alias_of and prefix + key.alias_of,
                **{name: value for name, value in shared.items() if getattr(key, name) == defaults[name]},
            )
            for key in rows
        )

    return complete


def section(path: str, source: str, meaning: str, **facts: Any) -> Callable[..., tuple[Key, ...]]:
    """Returns a function that completes the rows of an object and puts the object's own row before them."""
    own = row(path, facts.pop("kind", Kind.OBJECT), meaning, source=facts.pop("own_source", source), **facts)
    shared = {name: value for name, value in facts.items() if name in ("since", "removed", "instead")}
    complete = within(path, source, **shared)
    return lambda *rows: (own, *complete(*rows))
