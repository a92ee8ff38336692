"""The options that were typed: their values, and their words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that were typed on the command line."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in options.items() if source(name) is ParameterSource.COMMANDLINE}


def spelled(inputs: Mapping[str, Any]) -> str:
    """Returns inputs as they are typed.

    >>> spelled({"model": "qwen3-8b", "grad_ckpt": False, "packing": True, "hosts": "gpu[01-02]"})
    "--model qwen3-8b --no-grad-ckpt --packing --hosts 'gpu[01-02]'"
    """
    words = []
    for name, value in inputs.items():
        option = name.replace("_", "-")
        words.append(
            f"--{'' if value else 'no-'}{option}"
            if isinstance(value, bool)
            else f"--{option} {shlex.quote(str(value))}"
        )
    return " ".join(words)
