"""Every key of a DeepSpeed configuration, from keys.toml, from which lint, explain, schema and reference are made.

Also the parameters of every optimizer and schedule that a configuration can name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config.jsonc import Pointer
from dstrain.errors import InvalidConfig, nearest


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

    >>> summary(KEYS["zero_optimization", "stage3_max_live_parameters"])
    'Gathered elements kept per GPU before any is released. Stage 3 only.'
    """
    if not key.stages:
        return key.meaning
    stages = listed([str(stage) for stage in key.stages], "and")
    return f"{key.meaning} Stage{'s' if len(key.stages) > 1 else ''} {stages} only."


def meaning(key: Key) -> str:
    """Returns the meaning of a key; for a switch, the meaning of its section too.

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


_SWITCHES: dict[str, Any] = {"foreach": None, "maximize": False, "differentiable": False}
_GRAPH: dict[str, Any] = {**_SWITCHES, "capturable": False}
_BETAS, _NO_DECAY = [0.9, 0.999], {"weight_decay": 0}
_TORCH_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "amsgrad": False, "fused": None, **_GRAPH}
_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "weight_decay": 0, "bias_correction": True,
                         "amsgrad": False}  # fmt: skip
ENGINE_ADAM: Mapping[str, Any] = MappingProxyType(
    {"adam_w_mode": True, "torch_adam": False, "fp32_optimizer_states": True}
)
"""Parameters of Adam and AdamW that the engine itself reads."""

# fmt: off
TORCH_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "ASGD": {"lr": 0.01, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, **_NO_DECAY, **_GRAPH},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, **_NO_DECAY, **_GRAPH},
    "Adafactor": {"lr": 0.01, "beta2_decay": -0.8, "eps": [None, 0.001], "d": 1.0, **_NO_DECAY, "foreach": None,
                  "maximize": False},
    "Adagrad": {"lr": 0.01, "lr_decay": 0, **_NO_DECAY, "initial_accumulator_value": 0, "eps": 1e-10, "fused": None,
                **_SWITCHES},
    "Adam": {**_TORCH_ADAM, **_NO_DECAY, "decoupled_weight_decay": False},
    "AdamW": {**_TORCH_ADAM, "weight_decay": 0.01},
    "Adamax": {"lr": 0.002, "betas": _BETAS, "eps": 1e-8, **_NO_DECAY, **_GRAPH},
    "LBFGS": {"lr": 1, "max_iter": 20, "max_eval": None, "tolerance_grad": 1e-7, "tolerance_change": 1e-9,
              "history_size": 100, "line_search_fn": None},
    "NAdam": {"lr": 0.002, "betas": _BETAS, "eps": 1e-8, **_NO_DECAY, "momentum_decay": 0.004,
              "decoupled_weight_decay": False, **_GRAPH},
    "RAdam": {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, **_NO_DECAY, "decoupled_weight_decay": False, **_GRAPH},
    "RMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, **_NO_DECAY, "momentum": 0, "centered": False, **_GRAPH},
    "Rprop": {"lr": 0.01, "etas": [0.5, 1.2], "step_sizes": [1e-6, 50], **_GRAPH},
    "SGD": {"lr": 1e-3, "momentum": 0, "dampening": 0, **_NO_DECAY, "nesterov": False, "fused": None, **_SWITCHES},
    "SparseAdam": {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "maximize": False},
})
"""Classes of torch.optim, spelled exactly → their parameters with defaults.

Source: the signatures of torch 2.13; the names Adagrad, Adam, AdamW and Muon select DeepSpeed's own.
"""
_CPU_ADAGRAD: dict[str, Any] = {"lr": 0.01, "eps": 1e-10, "weight_decay": 0, "amsgrad": False,
                                "fp32_optimizer_states": True}
_LION: dict[str, Any] = {"lr": 1e-3, "betas": _BETAS, "weight_decay": 0}
OWN_OPTIMIZERS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({
    "adam": {**_ADAM, "set_grad_none": True, **ENGINE_ADAM},
    "adamw": {**_ADAM, "set_grad_none": True, **ENGINE_ADAM},
    "adagrad": TORCH_OPTIMIZERS["Adagrad"],
    "lamb": {**_ADAM, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01},
    "lion": {**_LION, "set_grad_none": True},
    "muon": {"lr": 0.02, "muon_lr": None, "adam_lr": None, "momentum": 0.95, "weight_decay": 0, "ns_method": "gram",
             "betas": [0.9, 0.95], "eps": 1e-10, "per_head_muon": False, "foreach": None, **ENGINE_ADAM},
    "muadam": None,
    "muadamw": None,
    "musgd": None,
})
"""DeepSpeed's optimizers, case-insensitive → their parameters with defaults; None: mup's.

Source: deepspeed 0.19.8 runtime/config.py: DEEPSPEED_OPTIMIZERS, runtime/engine.py: _configure_basic_optimizer.
"""
CPU_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "adam": {**_ADAM, **ENGINE_ADAM},
    "adamw": {**_ADAM, **ENGINE_ADAM},
    "adagrad": _CPU_ADAGRAD,
    "lion": {**_LION, "fp32_optimizer_states": True},
})
"""Optimizers that have other parameters if offloaded. Source: deepspeed 0.19.8 ops."""
# fmt: on


def optimizer_parameters(name: str, given: Mapping[str, Any], *, is_offloaded: bool) -> Mapping[str, Any] | None:
    """Returns the parameters of an optimizer with their defaults, or None if they are unknown.

    >>> optimizer_parameters("AdamW", {"torch_adam": True}, is_offloaded=False)["weight_decay"]
    0.01
    """
    own = name.lower()
    if own in ("adam", "adamw") and given.get("torch_adam") is True:
        is_plain = own == "adam" and given.get("adam_w_mode") is False
        return {**TORCH_OPTIMIZERS["Adam" if is_plain else "AdamW"], **ENGINE_ADAM}
    if own in OWN_OPTIMIZERS:
        return CPU_OPTIMIZERS.get(own, OWN_OPTIMIZERS[own]) if is_offloaded else OWN_OPTIMIZERS[own]
    return TORCH_OPTIMIZERS.get(name)


_LAST: dict[str, Any] = {"last_batch_iteration": -1}
_WARMUP: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", **_LAST}
_EPOCH: dict[str, Any] = {"last_epoch": -1}

# fmt: off
OWN_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
                    "lr_range_test_staircase": False, **_LAST},
    "OneCycle": {"cycle_min_lr": ..., "cycle_max_lr": ..., "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
                 "cycle_second_step_size": None, "cycle_first_stair_count": 0, "cycle_second_stair_count": None,
                 "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
                 "decay_mom_rate": 0.0, **_LAST},
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": ..., "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": ..., "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
})
"""DeepSpeed's schedules → their parameters with defaults; `...` marks required ones.

Source: the signatures in deepspeed 0.19.8 runtime/lr_schedules.py.
"""
TORCH_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "ConstantLR": {"factor": 1 / 3, "total_iters": 5, **_EPOCH},
    "CosineAnnealingLR": {"T_max": ..., "eta_min": 0.0, **_EPOCH},
    "CosineAnnealingWarmRestarts": {"T_0": ..., "T_mult": 1, "eta_min": 0.0, **_EPOCH},
    "CyclicLR": {"base_lr": ..., "max_lr": ..., "step_size_up": 2000, "step_size_down": None, "mode": "triangular",
                 "gamma": 1.0, "scale_fn": None, "scale_mode": "cycle", "cycle_momentum": True, "base_momentum": 0.8,
                 "max_momentum": 0.9, **_EPOCH},
    "ExponentialLR": {"gamma": ..., **_EPOCH},
    "LinearLR": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5, **_EPOCH},
    "MultiStepLR": {"milestones": ..., "gamma": 0.1, **_EPOCH},
    "OneCycleLR": {"max_lr": ..., "total_steps": None, "epochs": None, "steps_per_epoch": None, "pct_start": 0.3,
                   "anneal_strategy": "cos", "cycle_momentum": True, "base_momentum": 0.85, "max_momentum": 0.95,
                   "div_factor": 25.0, "final_div_factor": 10000.0, "three_phase": False, **_EPOCH},
    "PolynomialLR": {"total_iters": 5, "power": 1.0, **_EPOCH},
    "ReduceLROnPlateau": {"mode": "min", "factor": 0.1, "patience": 10, "threshold": 0.0001, "threshold_mode": "rel",
                          "cooldown": 0, "min_lr": 0, "eps": 1e-8},
    "StepLR": {"step_size": ..., "gamma": 0.1, **_EPOCH},
})
"""Classes of torch.optim.lr_scheduler that JSON can express, likewise. Source: the signatures of torch 2.13."""
PYTHON_SCHEDULES = ("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR")
"""Classes of torch.optim.lr_scheduler that need functions or other schedules, which JSON cannot express."""
# fmt: on
