"""The option by which a user trusts a job; the options that were typed, as values and as words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from dstrain.job.code_variables import TRUSTED
from dstrain.units import GIB, MIB


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
            else f"--{option} {shlex.quote(_size(value) if name in _SIZES else str(value))}"
        )
    return " ".join(words)


_SIZES = ("host_memory", "gpu_memory_limit")
"""Options whose value is a number of bytes."""


def _size(count: int) -> str:
    """Returns bytes in the largest unit of which they are a whole number.

    >>> _size(64 * 2**30), _size(85_899_345_921)
    ('64GiB', '85899345921')
    """
    return f"{count // GIB}GiB" if count % GIB == 0 else f"{count // MIB}MiB" if count % MIB == 0 else str(count)


def _trust(context: click.Context, option: click.Parameter, is_trusted: bool) -> None:
    token = TRUSTED.set(is_trusted)
    context.call_on_close(lambda: TRUSTED.reset(token))


TRUST = click.option(
    "--trust-job",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Take variables that may run code (LD_PRELOAD, PYTHONPATH …) from the job, and from .deepspeed_env here.",
)
