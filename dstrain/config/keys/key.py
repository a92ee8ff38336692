"""The record of one key of a DeepSpeed configuration, and all records, which keys.toml holds."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
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


def _read() -> tuple[Key, ...]:
    """Returns the rows of keys.toml in their order."""
    rows: dict[str, Key] = {}
    tables = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
    for path, table in tables.items():
        facts = {"path": path} | {name: _parsed(name, value) for name, value in table.items()}
        if (other := rows.get(table.get("alias_of", ""))) is not None:
            name = other.path.rpartition(".")[2]
            rows[path] = replace(other, filled=None, stages=(), **{"meaning": f"Another name of {name}.", **facts})
        else:
            rows[path] = Key(**facts)
    return tuple(rows.values())


def _parsed(name: str, value: Any) -> Any:
    """Returns the value of a field as `Key` holds it; defaults are the user's JSON, in which lists stay lists."""
    if name == "kind":
        return Kind[value.upper()]
    if name == "names":
        return Names(value)
    return tuple(value) if isinstance(value, list) and name != "default" else value


ROWS = _read()
"""Every key, in the order of the reference."""
