"""Reads the tables of tools: one TOML for each, with a row for every key.

    [written]      key = ["target", "converter argument …", default]; the last two may be left out, "null" is None
    [notes]        key = what to say of a key that is written
    [read_with]    other key = keys that are read together with it
    [defaults]     key = a default for a key of the table that this one rests on
    [[needless]]   why, keys: dstrain does without them
    [[missing]]    why, keys, unless: without counterpart; the training is the same except for them
    [[stops]]      why, keys, unless: without them something else would be trained

`unless` has values that mean the same as an absent key, and `section` is the section of all keys of a part. The
converter `x` is `_x` or `x` in the module of the tool, or else `x` in one of the modules in _SHARED.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config.imports import converters as convert
from dstrain.config.imports import datasets, source
from dstrain.config.imports.source import ABSENT, READ, Convert, Converted, Fate, Row, Source

_SHARED = (convert, datasets, source)
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
    """Returns the rows of a table, or of the TOML of a name, over the rows that it rests on; `own` has the tool's
    converters by name."""
    section = read_table(table) if isinstance(table, str) else table
    found = dict(base or {})
    made = (*_written(section, own), *_read_with(section), *_unwritten(section))
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
    shared = next((getattr(module, name) for module in _SHARED if hasattr(module, name)), None)
    found: Any = own.get(f"_{name}") or own.get(name) or shared
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


def _visible(value: Any, source: Source) -> Any:
    devices = convert.names(value, source)
    return len(devices) if devices else ABSENT


def _per_node(value: Any, source: Source) -> Any:
    if str(value) in ("auto", "gpu", "cpu"):
        return ABSENT
    return convert.count(value, source)


def _hub(name: str, otherwise: str) -> Any:
    def converted(value: Any, _: Source) -> str:
        return name if str(value).lower() in ("1", "true") else otherwise

    return converted


def _cpu(value: Any, _: Source) -> Any:
    return Converted(values={"machines.gpu": "cpu"}) if str(value) == "cpu" else ABSENT


_PER_NODE = ("NPROC_PER_NODE", "GPUS_PER_NODE", "NGPUS_PER_NODE", "NUM_GPUS_PER_NODE", "GPU_PER_NODE")
_ALL_GPUS = ("GPUS", "NUM_GPUS", "NGPUS", "N_GPUS", "NUM_DEVICES", "GPU_NUM", "NUM_PROCESSES", "WORLD_SIZE")
_NODES = ("NNODES", "NUM_NODES", "NODES", "NODE_NUM", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def launch_variables(
    environment: Mapping[str, str], *, gpus: int | None, gpus_per_node: int | None, script: str
) -> dict[str, str]:
    """Returns the variables of a launch that are set before a script: by the GPUs that are asked for, or else as the
    shell has them. WORLD_SIZE counts nodes where the script gives it to torchrun as such, and ranks elsewhere."""
    found = {name: environment[name] for name in (*_PER_NODE, *_ALL_GPUS, *_NODES) if environment.get(name)}
    if gpus is None:
        return found
    per_node = min(gpus, gpus_per_node or 8)
    nodes = max(1, gpus // per_node)
    found |= dict.fromkeys(_PER_NODE, str(per_node)) | dict.fromkeys(_ALL_GPUS, str(gpus))
    counts_nodes = re.search(r"nnodes[= ]+[\"']?\$\{?WORLD_SIZE", script) is not None
    return found | dict.fromkeys((*_NODES, *(["WORLD_SIZE"] if counts_nodes else [])), str(nodes))


RANKS = rows_of("variables", globals())
"""Variables that launchers and tools read."""

LAUNCHERS = rows_of("launchers", globals())
"""Options of torchrun and deepspeed."""


def _run_name(value: Any, _: Source) -> Any:
    return str(value) if value else ABSENT


def _kwargs(value: Any, _: Source) -> Any:
    return value or ABSENT


def _checkpointing_kwargs(value: Any, _: Source) -> Any:
    return Converted(values={}, note="chosen by the method: non-reentrant, except for adapters under ZeRO-3")


TRAINING_ARGUMENTS = rows_of("huggingface", globals())
"""Keys of Transformers' TrainingArguments, which several tools pass on, with their defaults."""
