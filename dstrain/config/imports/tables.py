"""Reads the tables of tools: one TOML for each, with a row for every key.

    [written]      key = ["target", "converter argument …", default]; the last two may be left out, "null" is None
    [notes]        key = what to say of a key that is written
    [read_with]    other key = keys that are read together with it
    [defaults]     key = a default for a key of the table that this one rests on
    [[needless]]   why, keys: dstrain does without them
    [[missing]]    why, keys, unless: without counterpart; the training is the same except for them
    [[stops]]      why, keys, unless: without them something else would be trained

`unless` has values that mean the same as an absent key, and `section` is the section of all keys of a part. A converter
is one of the tool's own, or a function of the modules in _SHARED.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config.imports import converters, datasets, preferences
from dstrain.config.imports.source import ABSENT, READ, Convert, Fate, Row, Source, same

_SHARED = (converters, preferences, datasets)
_FATES = {"needless": Fate.NEEDLESS, "missing": Fate.MISSING, "stops": Fate.OTHER_TRAINING}
_NONE: Mapping[str, Convert] = {}


def read_table(name: str) -> dict[str, Any]:
    """Returns a TOML of this package."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def rows_of(
    table: str | Mapping[str, Any],
    own: Mapping[str, Callable[..., Any]] = _NONE,
    *,
    base: Mapping[str, Row] | None = None,
) -> dict[str, Row]:
    """Returns the rows of a table, or of the TOML of a name, over those that it rests on; `own` are converters by
    name."""
    section = read_table(table) if isinstance(table, str) else table
    found = dict(base or {})
    made = (*_written(section, {"same": same, **own}), *_read_with(section), *_unwritten(section))
    found |= {row.key: row for row in made}
    for key, default in section.get("defaults", {}).items():
        found[key] = replace(found[key], default=default)
    return found


def _written(section: Mapping[str, Any], own: Mapping[str, Convert]) -> Iterator[Row]:
    notes = section.get("notes", {})
    for key, (target, *rest) in section.get("written", {}).items():
        convert = _converter(rest[0] if rest else "same", own)
        default = ABSENT if len(rest) < 2 else None if rest[1] == "null" else rest[1]
        note = notes.get(key, "")
        yield Row(key=key, fate=Fate.WRITTEN, target=target, convert=convert, default=default, note=note, unless=())


def _converter(text: str, own: Mapping[str, Callable[..., Any]]) -> Convert:
    """Returns the converter of a name, or the one that a function makes for the arguments behind its name."""
    name, *arguments = text.split()
    shared = [getattr(module, name) for module in _SHARED if hasattr(module, name)]
    found: Callable[..., Any] = own[name] if name in own else shared[0]
    converter: Convert = found(*arguments) if arguments else found
    return converter


def _read_with(section: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of keys that are read together with another one; without that they ask for nothing."""
    for other, keys in section.get("read_with", {}).items():

        def convert(_: Any, source: Source, other: str = other) -> Any:
            return ABSENT if source.value(other, ABSENT) is ABSENT else READ

        for key in keys.split():
            yield Row(key=key, fate=Fate.WRITTEN, convert=convert, note=f"read with `{other}`", unless=())


def _unwritten(section: Mapping[str, Any]) -> Iterator[Row]:
    for name, fate in _FATES.items():
        for part in section.get(name, ()):
            prefix = f"{part['section']}." if "section" in part else ""
            unless = tuple(part.get("unless", ()))
            for key in part["keys"].split():
                yield Row(key=f"{prefix}{key}", fate=fate, note=part["why"], unless=unless)
