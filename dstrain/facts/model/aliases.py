"""Models that dstrain knows by name: their hub ids, and the shape in their config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One published checkpoint."""

    hub_id: str
    """Its id on the Hugging Face hub."""
    modelscope_id: str | None
    """Its id on ModelScope, or None if unknown."""
    source: str
    """URL of the config."""
    config: Mapping[str, Any]
    """The fields of its config.json that `families.from_config` reads."""


def known() -> list[str]:
    """Returns the alias of every shipped model."""
    return list(_table())


def resolve(name: str) -> tuple[str, Entry] | None:
    """Returns the alias and the checkpoint of a name, or None if it is not a shipped model.

    A name is an alias or a hub id, with or without the organisation; case, dashes, dots, underscores and spaces do not
    matter. The id of a variant, such as the instruction-tuned one, gives the alias of its shape and the variant's own
    ids. An id of another organisation never matches.

    >>> alias, entry = resolve("qwen/qwen2_5-7b-instruct")
    >>> alias, entry.hub_id
    ('qwen2.5-7b', 'Qwen/Qwen2.5-7B-Instruct')
    """
    return _index().get(_folded(name))


def _folded(name: str) -> str:
    """Returns the name without case and separators, except between two numbers.

    >>> _folded("Llama-3.1_8B") == _folded("llama3-1 8b") != _folded("llama-318b")
    True
    """
    words = re.sub(r"[\s._-]+", "-", name.strip().lower()).strip("-")
    return re.sub(r"(?<![0-9])-|-(?![0-9])", "", words)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """Returns the shipped table: alias → ids, source, config, and variants with the keys that differ."""
    text = Path(__file__).with_name("aliases.json").read_text(encoding="utf-8")
    table: dict[str, Mapping[str, Any]] = json.loads(text)
    return MappingProxyType(table)


@cache
def _index() -> Mapping[str, tuple[str, Entry]]:
    """Returns folded name → (alias, checkpoint); aliases win over variants, and upper rows over lower ones."""
    index: dict[str, tuple[str, Entry]] = {}
    for alias in _table():
        index[_folded(alias)] = (alias, _entries(alias)[0])
    for alias in _table():
        for entry in _entries(alias):
            for hub_id in filter(None, (entry.hub_id, entry.modelscope_id)):
                index.setdefault(_folded(hub_id), (alias, entry))
                index.setdefault(_folded(hub_id.partition("/")[2]), (alias, entry))
    return MappingProxyType(index)


@cache
def _entries(alias: str) -> tuple[Entry, ...]:
    """Returns the checkpoint of an alias, followed by its variants."""
    row = _table()[alias]
    ids = {row["hub_id"]: {"modelscope_id": row["modelscope_id"]}, **row["variants"]}
    return tuple(
        Entry(
            hub_id=hub_id,
            modelscope_id=variant.get("modelscope_id", hub_id),
            source=row["source"],
            config=MappingProxyType({**row["config"], **variant.get("config", {})}),
        )
        for hub_id, variant in ids.items()
    )
