"""Values of a row: whether they are given, strings among them, and how messages show them and those not used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isnan
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.units import counted


def is_given(value: Any) -> bool:
    """Returns whether a value is set; files fill missing ones with null, NaN or something empty."""
    if value is None:
        return False
    if isinstance(value, float) and isnan(value):
        return False
    return value not in ("", "[]", "{}", "null") and value != [] and value != {}


def string(row: Mapping[str, Any], key: str, place: str | None = None) -> str:
    """Returns the string at a key. Raises InvalidConfig if it is missing or no string."""
    value = row.get(key)
    if isinstance(value, str):
        return value
    before = f"{place}: " if place else ""
    if value is None:
        raise InvalidConfig(f'{before}"{key}" is missing')
    raise InvalidConfig(f'{before}"{key}" is {shown(value)}; it must be a string')


def shown(value: Any) -> str:
    """Returns a value as short JSON, for a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def without_missing(value: Any) -> Any:
    """Returns a value without the keys that are None in nested objects: Arrow gives every object all keys.

    >>> without_missing({"a": None, "b": [{"c": 1, "d": None}]})
    {'b': [{'c': 1}]}
    """
    if isinstance(value, Mapping):
        return {key: without_missing(item) for key, item in value.items() if item is not None}
    return [without_missing(item) for item in value] if isinstance(value, list) else value


def unused_text(counts: Mapping[str, int]) -> str:
    """Returns a line about unused columns, given as name → number of samples with it.

    >>> unused_text({"source": 1200, "messages.name": 1})
    'unused columns: source (1,200 samples), messages.name (1 sample)'
    """
    words = (f"{name} ({count:,} sample{'s' if count > 1 else ''})" for name, count in counts.items())
    return f"unused columns: {', '.join(words)}"


def unusable(count: int) -> str:
    """Returns a number of unusable rows with its verb.

    >>> unusable(1), unusable(2)
    ('1 unusable row was', '2 unusable rows were')
    """
    return f"{counted(count, 'unusable row')} {'was' if count == 1 else 'were'}"
