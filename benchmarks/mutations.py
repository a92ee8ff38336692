"""Mutates configurations, jobs, hostfiles and messages: their values and keys as JSON, and their bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from dstrain.config.keys import KEYS

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 16, 0.5, 1e-8, 1e14, 1e308, -1e308, 10**30, 10**400, "", "auto", "cpu", "nvme",
    "gpu", "1e400", "1e5", "-1", "3", "true", "none", "nan", "Infinity", "../..", "\x00", "\ud800", "é\u202e",
    "x" * 5000, [], {}, [[]], [None], {"": {}}, {"device": {}}, [1, "2", {}], {"stage": [3]},
)  # fmt: skip
"""Values that no key expects, and some that many do."""
TOKENS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"'", b"//", b"/*", b"*/", b"#", b"\n", b"\r\n", b"\t", b"\x00", b"\xff",
    b"- ", b"&a ", b"*a", b"!!python/name:os.system ", b"|\n", b"---\n", b"...\n", b"? ", b"<<: *a\n", b"NaN", b"1e999",
    b"-", b"\\u", b" slots=", b" slots=99999999999999999999", b"gpu[01-99]", b"\xef\xbb\xbf", b"<<<<<<< HEAD\n",
    b"\xed\xa0\x80", b"2024-13-45",
)  # fmt: skip
"""Pieces of text that mean something to one of the readers."""
KEY_PLACES = sorted(KEYS)
"""The paths of DeepSpeed's keys."""


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Returns an input with one to four mutations, most of them of values and keys where it is JSON."""
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        try:
            value = json.loads(raw) if rng.random() < 0.7 else None
        except (ValueError, RecursionError):
            value = None
        raw = _of_value(rng, value) if isinstance(value, dict) else _of_bytes(rng, raw)
    return raw


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from _places(inner, (*place, key))


def _of_value(rng: random.Random, value: dict[str, Any]) -> bytes:
    """Returns an object with one value or key changed, removed, added or doubled."""
    places = list(_places(value))
    kind = rng.random()
    if not places or kind < 0.35:
        names = rng.choice(KEY_PLACES)
        _put(value, [rng.choice(["x", "0", "é"]) if name == "*" else name for name in names], _junk(rng))
    else:
        *above, last = rng.choice(places)
        node: Any = value
        for key in above:
            node = node[key]
        if kind < 0.7:
            node[last] = _junk(rng)
        elif kind < 0.8:
            del node[last]
        elif kind < 0.9 and isinstance(node, dict):
            node[rng.choice([_slip(rng, last), rng.choice(KEY_PLACES)[-1]])] = node.pop(last)
        else:
            node[last] = copy.deepcopy(value)
    text = json.dumps(value, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", errors="surrogatepass")


def _put(value: dict[str, Any], names: Sequence[str], new: Any) -> None:
    for name in names[:-1]:
        inner = value.setdefault(name, {})
        if not isinstance(inner, dict):
            inner = value[name] = {}
        value = inner
    value[names[-1]] = new


def _slip(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word) + 1)
    return word[:at] + rng.choice(["", "x", "_", word[at : at + 1] * 2]) + word[at + 1 :]


def _junk(rng: random.Random) -> Any:
    row = KEYS[rng.choice(KEY_PLACES)] if rng.random() < 0.3 else None
    if row is not None:
        return rng.choice([row.default, row.least, row.most, *row.words])
    return rng.choice([*copy.deepcopy(JUNK), rng.randint(-9, 10**9), rng.random() * 10 ** rng.randint(-9, 20)])


def _of_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Returns bytes with some cut, doubled, flipped or put in; a line is doubled, indented or taken away as well."""
    at, length = rng.randrange(len(raw) + 1), rng.choice((1, 1, 4, 30))
    kind = rng.randrange(7)
    if kind == 0:
        return raw[:at] + raw[at + length :]
    if kind == 1:
        return raw[:at] + raw[at : at + length] * rng.choice((2, 2, 50)) + raw[at + length :]
    if kind == 2:
        return raw[:at] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 3)))) + raw[at + 1 :]
    if kind == 3:
        return raw[:at]
    if kind == 4:
        lines = raw.split(b"\n")
        line = rng.randrange(len(lines))
        lines[line : line + 1] = rng.choice([[], [lines[line]] * 2, [b"  " + lines[line]], [rng.choice(lines)]])
        return b"\n".join(lines)
    junk = json.dumps(_junk(rng)).encode() if kind == 5 else rng.choice(TOKENS)
    return raw[:at] + junk + raw[at + (length if rng.random() < 0.5 else 0) :]
