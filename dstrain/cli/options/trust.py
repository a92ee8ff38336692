"""The option by which a user trusts a job."""

from __future__ import annotations

import click

from dstrain.job.code_variables import TRUSTED


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
