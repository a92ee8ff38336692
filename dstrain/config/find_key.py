"""Finds the key of a path, a JSON pointer, or the end of a path."""

from __future__ import annotations

from dstrain.config.jsonc import Pointer
from dstrain.config.keys.key import Key
from dstrain.config.keys.table import KEYS, key_of
from dstrain.errors import InvalidConfig, nearest


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
        return "dstrain schema prints every key."
    more = f" (or {len(ends) - 1} more with that name)" if len(ends) > 1 else ""
    return f'Did you mean "{ends[0]}"{more}?'


def _by_use(path: str) -> tuple[bool, bool, str]:
    """Returns the sort key of a path: ZeRO's optimizer offload, then the rest of ZeRO, then other sections."""
    return not path.startswith("zero_optimization."), "offload_optimizer." not in path, path
