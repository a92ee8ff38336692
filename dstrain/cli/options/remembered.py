"""Resolves the options of gen-config: the ones typed now over the ones of the last time, spelled as typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dstrain.cli.options.typed import typed
from dstrain.config.edits.lock import LOCK, Lock
from dstrain.errors import InvalidConfig
from dstrain.job.file import is_local, looks_local

PATHS = ("model", "data", "eval_data", "hostfile", "template_dir")
"""Options that may name a file or a folder; the lock has them relative to the generated files."""
_ALTERNATIVES = (("hosts", "hostfile"),)
"""Options of which one replaces the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """The options that count."""

    options: Mapping[str, Any]
    """Every option with its value; paths are relative to the current folder."""
    inputs: Mapping[str, Any]
    """Those that were typed, now or the last time, as the lock keeps them."""
    is_repeated: bool
    """Whether the ones of the last time count too."""


def asked(options: Mapping[str, Any], lock: Lock | None, folder: Path) -> ResolvedOptions:
    """Returns the options that count.

    A model typed now makes a new question; without one the inputs of the last time hold, and options typed now replace
    the ones of the same name. Raises UsageError if neither names a model, InvalidConfig if only the lock, which may be
    somebody else's, names templates.
    """
    context = click.get_current_context()
    given = {name: as_input(name, value, folder) for name, value in typed(options).items()}
    if options["model"] is not None:
        return ResolvedOptions(options=options, inputs=given, is_repeated=False)
    if lock is None or "model" not in lock.inputs:
        why = "has none: its files were adopted" if lock else "is not there to repeat"
        raise click.UsageError(f"Missing option '--model', and {folder / LOCK} {why}.", context)
    inputs = {**lock.inputs, **given}
    # --hosts typed now ends the --hostfile of the last time, which would contradict it
    for names in _ALTERNATIVES:
        if any(name in given for name in names):
            inputs = {name: value for name, value in inputs.items() if name in given or name not in names}
    repeated = {name: value for name, value in inputs.items() if name not in given and name in options}
    if repeated.get("template_dir"):
        raise InvalidConfig(
            f"{folder / LOCK} names templates of its own: {repeated['template_dir']}",
            hint=f"They are used only when you name them: --template-dir {folder / str(repeated['template_dir'])}",
        )
    return ResolvedOptions(
        options={**options, **{name: None for names in _ALTERNATIVES for name in names if name not in inputs}}
        | {name: _parsed(context, name, value, folder) for name, value in repeated.items()},
        inputs=inputs,
        is_repeated=True,
    )


def relative(name: str | None, folder: Path) -> str | None:
    """Returns a local path as files in `folder` must name it; a hub id stays as it is."""
    if name is None or not is_local(name):
        return name
    path, folder = Path(name).resolve(), folder.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def as_input(name: str, value: Any, folder: Path) -> Any:
    """Returns the value of an option as the lock of a folder keeps it."""
    return relative(str(value), folder) if name in PATHS else value


def _parsed(context: click.Context, name: str, value: Any, folder: Path) -> Any:
    """Returns an input of the lock as Click would give it, a path as it is to be found from here."""
    parameter = next(option for option in context.command.params if option.name == name)
    if name in PATHS and (looks_local(value) or (folder / value).exists()):
        value = str(folder / value)
    return parameter.type_cast_value(context, value)
