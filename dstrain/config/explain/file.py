"""Explains a whole configuration by section: each key, its memory, and the defaults that apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.config.document import lookup
from dstrain.config.explain.key import COUNTED
from dstrain.config.jsonc import Pointer
from dstrain.config.key_bytes import Cost, Scale, cost
from dstrain.config.key_text import default_text, summary
from dstrain.config.keys.key import Key
from dstrain.config.keys.table import KEYS, is_read, key_of
from dstrain.config.lint.subject import ABSENT
from dstrain.config.resolve_auto import BATCH_KEYS
from dstrain.facts.ds_config import zero_stage
from dstrain.plan.estimate_records import Estimate

BATCH, PRECISION, ZERO, OTHER = "batch", "precision", "ZeRO", "other keys"
_BATCH_KEYS = (
    *("train_batch_size", *BATCH_KEYS, "gradient_clipping"),
    *("managed_gradient_accumulation", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
)
_PRECISION_KEYS = ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types", "communication_data_type")
_MATTERS = (*COUNTED, "gradient_clipping", "gradient_accumulation_steps", "zero_optimization.contiguous_gradients")
"""Keys whose defaults are listed if they apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a file."""

    pointer: Pointer
    value: Any
    key: Key | None
    """Its row; None for an unknown name."""
    filled: Any
    """The Trainer's value for "auto", or ABSENT."""
    cost: Cost | None
    """The memory that its number takes."""
    is_idle: bool
    """Whether the stage does not read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys that belong together."""

    name: str
    """One of this module's names, or the key of the section."""
    meaning: str | None
    """The purpose of the section."""
    parts_bytes: Mapping[str, int]
    """Bytes of each GPU at its peak, by part; empty without an estimate."""
    entries: tuple[Entry, ...]
    """Its keys, in the order of the file."""
    silent: tuple[tuple[Key, str], ...]
    """Important keys that the file omits, with the default that applies."""


def sections(
    config: Mapping[str, Any], *, filled: Mapping[Pointer, Any], by: Scale, estimate: Estimate | None
) -> list[Section]:
    """Returns the sections of a configuration, those that cost memory first."""
    groups: dict[str, list[str]] = {ZERO: [], BATCH: [], PRECISION: []}
    for name in config:
        if not name.startswith(("$", "_", "x-")):
            groups.setdefault(_group(name, config[name]), []).append(name)
    return [
        Section(
            name=group,
            meaning=summary(KEYS[(group,)]) if (group,) in KEYS else None,
            parts_bytes=_parts(group, estimate),
            entries=tuple(entry for name in names for entry in _entries((name,), config[name], config, filled, by)),
            silent=tuple(_silent(group, config)),
        )
        for group, names in groups.items()
        if names or group == ZERO
    ]


def rest_bytes(estimate: Estimate) -> Mapping[str, int]:
    """Returns the bytes of each GPU that belong to no key, by part."""
    parts = estimate.memory.breakdown_bytes
    return {
        "CUDA and NCCL": parts.context,
        "cuBLAS workspaces": parts.workspace,
        "unused memory of the allocator": parts.fragmentation,
    }


def _group(name: str, value: Any) -> str:
    if name == "zero_optimization":
        return ZERO
    if name in _BATCH_KEYS:
        return BATCH
    if name in _PRECISION_KEYS:
        return PRECISION
    return name if isinstance(value, dict) else OTHER


def _parts(group: str, estimate: Estimate | None) -> Mapping[str, int]:
    if estimate is None:
        return {}
    parts = estimate.memory.breakdown_bytes
    if group == ZERO:
        return {
            "parameters": parts.params,
            "gradients": parts.grads,
            "optimizer states": parts.optimizer,
            "buckets and temporaries": parts.buffers,
            "layers gathered whole": parts.gathered,
        }
    return {"activations": parts.activations, "logits": parts.logits} if group == BATCH else {}


def _entries(
    pointer: Pointer, value: Any, config: Mapping[str, Any], filled: Mapping[Pointer, Any], by: Scale
) -> Iterator[Entry]:
    """Yields the keys at and below a place, except objects with keys."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _entries((*pointer, name), inner, config, filled, by)
        return
    key = key_of(pointer)
    by_trainer = filled.get(pointer, ABSENT) if value == "auto" else ABSENT
    number = value if by_trainer is ABSENT else by_trainer
    yield Entry(
        pointer=pointer,
        value=value,
        key=key,
        filled=by_trainer,
        cost=cost(key.alias_of or key.path, number, config, by) if key else None,
        is_idle=not is_read(pointer, zero_stage(config)),
    )


def _silent(group: str, config: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yields the important keys of a section that the file omits and whose default has an effect here."""
    for path in _MATTERS:
        key = KEYS[tuple(path.split("."))]
        pointer = tuple(path.split("."))
        if _group(pointer[0], {}) != group or _has(config, path):
            continue
        if not isinstance(lookup(config, pointer[:-1], {} if len(pointer) == 2 else None), dict):
            continue  # its section is missing, or not an object
        if group == ZERO and path != "zero_optimization.stage" and zero_stage(config) == 0:
            continue
        if is_read(pointer, zero_stage(config)) and (default := default_text(key)) is not None:
            yield key, default


def _has(config: Mapping[str, Any], path: str) -> bool:
    """Returns whether a configuration has a key, under any of its names."""
    names = [path, *(key.path for key in KEYS.values() if key.alias_of == path)]
    return any(lookup(config, tuple(name.split("."))) is not ABSENT for name in names)
