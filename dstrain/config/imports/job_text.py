"""Writes imported values into the text of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dstrain.config.document import REMOVED, Change, lookup, same
from dstrain.config.edits import edit_yaml
from dstrain.config.imports.walk import Imported, Value, is_full
from dstrain.errors import Place
from dstrain.job.model_changes import Lora
from dstrain.job.monitor import Monitor, Samples
from dstrain.job.schema import Job
from dstrain.job.task_losses import Dpo
from dstrain.job.yaml_source import parse_yaml
from dstrain.records import Keys, Locator

_SECTIONS = {"dpo": Dpo, "lora": Lora, "samples": Samples, "monitor": Monitor}
_PATHS = ("data", "eval_data", "model")
"""Keys of which gen-config itself writes a single name, relative to the job."""


def edited(text: str, imported: Imported) -> str:
    """Returns a generated job file with the imported values; one that is the tool's default says so in a comment."""
    data, _ = parse_yaml(text, "job.yaml")
    changes = [
        Change(
            pointer=tuple(target.split(".")),
            value=value.value,
            after=_before(target),
            comment=f"{imported.source.tool.title}'s default" if value.is_default else None,
        )
        for target, value in written(imported).items()
        if not same(_present(data, target), value.value)
    ]
    return edit_yaml.apply(text, "job.yaml", changes)


def written(imported: Imported) -> dict[str, Value]:
    """Returns the values that job.yaml gets, without those of an adapter that is not trained."""
    is_adapter = not is_full(imported.values)
    return {
        target: value
        for target, value in imported.job.items()
        if (target not in _PATHS or not isinstance(value.value, str)) and (is_adapter or not target.startswith("lora."))
    }


def locator(imported: Imported, job: Path) -> Locator:
    """Returns the place of a job's key: in the imported file, or in the job for what it does not set."""

    def locate(keys: Keys) -> Place:
        for length in range(len(keys), 0, -1):
            value = imported.values.get(".".join(map(str, keys[:length])))
            if value is not None:
                return value.place
        return Place(file=str(job))

    return locate


def _present(data: Mapping[str, Any], target: str) -> Any:
    """Returns the value that a job has for a key: the written one, or the default."""
    pointer = tuple(target.split("."))
    value = lookup(data, pointer)
    if value is not REMOVED:
        return value
    record = _SECTIONS[pointer[0]] if len(pointer) > 1 else Job
    field = next(field for field in fields(record) if field.name == pointer[-1])
    default = field.default if field.default is not MISSING else REMOVED
    return list(default) if isinstance(default, tuple) else default


def _before(target: str) -> tuple[str, ...]:
    """Returns the keys that precede a key in the schema of its section."""
    *outer, name = target.split(".")
    names = [field.name for field in fields(_SECTIONS[outer[0]] if outer else Job)]
    return tuple(names[: names.index(name)])
