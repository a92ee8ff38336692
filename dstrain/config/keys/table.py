"""All keys as one table: the lookup of a position in a document, and of a name that a user types."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dstrain.config.jsonc import Pointer
from dstrain.config.keys.data import DATA
from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.monitors import COMPILING, MONITORS, TUNING
from dstrain.config.keys.optimizers import OPTIMIZERS, SCHEDULERS
from dstrain.config.keys.parallel import PARALLEL
from dstrain.config.keys.precision import PRECISION
from dstrain.config.keys.removed import REMOVED
from dstrain.config.keys.top import TOP
from dstrain.config.keys.zero import OFFLOAD, ZERO
from dstrain.errors import InvalidConfig, nearest

ROWS: tuple[Key, ...] = (
    *TOP,
    *ZERO,
    *OFFLOAD,
    *PRECISION,
    *OPTIMIZERS,
    *SCHEDULERS,
    *PARALLEL,
    *COMPILING,
    *MONITORS,
    *DATA,
    *TUNING,
    *REMOVED,
)
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
