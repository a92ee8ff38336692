"""All keys as one table: look-ups by a place in a document and by a typed name, and a key's description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from dstrain.config.jsonc import Pointer
from dstrain.config.keys.key import ROWS, Key, Kind
from dstrain.errors import InvalidConfig, nearest

KEYS: Mapping[tuple[str, ...], Key] = MappingProxyType({tuple(key.path.split(".")): key for key in ROWS})
_BELOW: dict[tuple[str, ...], tuple[Key, ...]] = {}
"""The rows directly inside each object, by the object's path."""
for _path, _key in KEYS.items():
    _BELOW[_path[:-1]] = (*_BELOW.get(_path[:-1], ()), _key)


def key_of(pointer: tuple[str | int, ...]) -> Key | None:
    """Returns the row of a place in a document; an object's aliases share its rows.

    >>> key_of(("bfloat16", "enabled")).path
    'bf16.enabled'
    >>> key_of(("tensor_parallel", "partition_config", "layer_specs", 0, "shape")).path
    'tensor_parallel.partition_config.layer_specs.*.shape'
    """
    key: Key | None = None
    for part in pointer:
        above = _inside(key)
        key = (KEYS.get((*above, part)) if isinstance(part, str) else None) or KEYS.get((*above, "*"))
        if key is None:
            return None
    return key


def is_read(pointer: tuple[str | int, ...], stage: int) -> bool:
    """Returns whether the engine reads a key at a ZeRO stage, by its row and the rows of its sections.

    >>> is_read(("zero_optimization", "offload_param", "device"), 2)
    False
    """
    if stage == 0 and pointer[:1] == ("zero_optimization",) and len(pointer) > 1 and pointer[1] not in _AT_ZERO_0:
        return False
    rows = (key_of(pointer[:end]) for end in range(1, len(pointer) + 1))
    return all(not row.stages or stage in row.stages for row in map(_meant, filter(None, rows)))


_AT_ZERO_0 = frozenset({"stage", "overlap_comm", "allgather_bucket_size", "legacy_stage1"})
"""Source: deepspeed 0.19.8 runtime/engine.py: _configure_bf16_optimizer, _do_sanity_check."""


def _meant(row: Key) -> Key:
    """Returns the row of which a row is another name."""
    return KEYS[tuple(row.alias_of.split("."))] if row.alias_of else row


def children(pointer: tuple[str | int, ...]) -> tuple[Key, ...]:
    """Returns the rows directly inside a place; () is the whole file.

    >>> [key.path for key in children(("timers",))]
    ['timers.throughput']
    """
    key = key_of(pointer)
    return () if pointer and key is None else _BELOW.get(_inside(key), ())


def _inside(key: Key | None) -> tuple[str, ...]:
    """Returns the path that contains the rows of an object; None is the whole file."""
    if key is None:
        return ()
    path = key.alias_of if key.alias_of and key.kind is Kind.OBJECT else key.path
    return tuple(path.split("."))


class NoKey(InvalidConfig):
    """DeepSpeed has no such key."""


def named(text: str) -> tuple[Pointer, Key]:
    """Returns the place and the row of a key.

    Raises NoKey if no key ends with the text, and InvalidConfig if several keys do, with suggestions.

    >>> named("overlap_comm")[0]
    ('zero_optimization', 'overlap_comm')
    >>> named("/bf16/enabled")[1].path
    'bf16.enabled'
    >>> named("offload_param.device")[1].path
    'zero_optimization.offload_param.device'
    """
    pointer = _from_pointer(text) if text.startswith("/") else tuple(text.strip(". ").split("."))
    if (key := key_of(pointer)) is not None:
        return pointer, key
    matches = [path for path in KEYS if path[-len(pointer) :] == pointer]
    # keys that are gone count only if no other ends with the text
    live = [path for path in matches if KEYS[path].removed is None] or matches
    if len(live) == 1:
        return live[0], KEYS[live[0]]
    if live:
        paths = sorted((".".join(path) for path in live), key=_by_use)
        raise InvalidConfig(
            f'several keys end with "{text}":\n' + "\n".join(paths),
            hint=f"Write the whole path: dstrain explain {paths[0]}",
        )
    raise NoKey(f'neither DeepSpeed nor job.yaml has a key "{text}"', hint=_did_you_mean(".".join(map(str, pointer))))


def _from_pointer(text: str) -> Pointer:
    """Returns the parts of an RFC 6901 pointer; numbers are list indexes."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in text[1:].split("/")]
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _did_you_mean(text: str) -> str:
    """Returns a suggestion: the nearest path or, for a single name, the keys with the nearest name."""
    paths = {".".join(path): path for path in KEYS}
    if "." in text and (near := nearest(text, paths)):
        return f'Did you mean "{near}"?'
    name = nearest(text.rsplit(".", 1)[-1], {path[-1] for path in KEYS})
    ends = sorted((path for path, parts in paths.items() if parts[-1] == name), key=_by_use)
    if not ends:
        return "dstrain show schema prints every key."
    more = f" (or {len(ends) - 1} more with that name)" if len(ends) > 1 else ""
    return f'Did you mean "{ends[0]}"{more}?'


def _by_use(path: str) -> tuple[bool, bool, str]:
    """Returns the sort key of a path: ZeRO's optimizer offload, then the rest of ZeRO, then other sections."""
    return not path.startswith("zero_optimization."), "offload_optimizer." not in path, path


def description(key: Key) -> str:
    """Returns the description shown by editors: the meaning, then a line for each further fact.

    >>> from dstrain.config.keys.table import KEYS
    >>> print(description(KEYS["gradient_clipping",]))
    Maximum global L2 norm of the gradients; larger gradients are scaled down. 0 disables clipping.
    Default: 1.0 since 0.19.3; 0.0 before.
    "auto": the Trainer fills in max_grad_norm.
    """
    lines = [summary(key)]
    if (default := default_text(key)) is not None:
        lines.append(f"Default: {default}.")
    if key.filled is not None:
        lines.append(f'"auto": the Trainer fills in {key.filled}.')
    if key.since is not None:
        lines.append(f"Since DeepSpeed {key.since}.")
    if key.instead is not None:
        lines.append(f"Deprecated: {key.instead}.")
    return "\n".join(lines)


def summary(key: Key) -> str:
    """Returns the meaning of a key, with the ZeRO stages that read it.

    >>> from dstrain.config.keys.table import KEYS
    >>> summary(KEYS["zero_optimization", "stage3_max_live_parameters"])
    'Gathered elements kept per GPU before any is released. Stage 3 only.'
    """
    if not key.stages:
        return key.meaning
    stages = listed([str(stage) for stage in key.stages], "and")
    return f"{key.meaning} Stage{'s' if len(key.stages) > 1 else ''} {stages} only."


def meaning(key: Key) -> str:
    """Returns the meaning of a key; for a switch, the meaning of its section too.

    >>> from dstrain.config.keys.table import KEYS
    >>> meaning(KEYS["timers", "throughput", "enabled"])
    'Enables the section. The timer behind the reported samples per second.'
    """
    text = summary(key)
    return f"{text} {summary(KEYS[tuple(key.path.split('.')[:-1])])}" if key.is_switch else text


def default_text(key: Key) -> str | None:
    """Returns the default for display, or None."""
    if key.default_note is not None:
        return key.default_note
    return None if key.default is None else json.dumps(key.default, ensure_ascii=False)


def kind_text(key: Key) -> str:
    """Returns the type with its range and its legal words.

    >>> from dstrain.config.keys.table import KEYS
    >>> kind_text(KEYS["zero_optimization", "stage"])
    'whole number, 0 to 3'
    >>> kind_text(KEYS["zero_optimization", "offload_param", "device"])
    'none, cpu or nvme'
    """
    words = spoken_words(key)
    if key.kind is Kind.TEXT and words:
        text = listed(words)
    else:
        text = str(key.kind) + _range_text(key) + "".join(f" or {word}" for word in words)
    return f"{text}, or null" if key.is_nullable else text


def spoken_words(key: Key) -> list[str]:
    """Returns the legal words without those that differ only in case."""
    words: dict[str, str] = {}
    for word in key.words:
        words.setdefault(word.lower(), word)
    return list(words.values())


def listed(words: list[str], last: str = "or") -> str:
    """Returns words as an enumeration.

    >>> listed(["a", "b", "c"])
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _range_text(key: Key) -> str:
    if key.least is not None and key.most is not None:
        return f", {key.least:g} to {key.most:g}"
    if key.least is not None:
        return f", {key.least:g} " + ("or more" if key.below is None else f"to below {key.below:g}")
    if key.above is not None or key.below is not None:
        return f", above {key.above:g}" if key.above is not None else f", below {key.below:g}"
    return f", at most {key.most:g}" if key.most is not None else ""
