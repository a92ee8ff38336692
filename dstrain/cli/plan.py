"""`dstrain plan`: estimates one configuration or finds the best one; writes nothing."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from dstrain.cli.console import answer_json
from dstrain.cli.options.planning import plan_options
from dstrain.cli.options.question import PlanInputs, plan_inputs
from dstrain.cli.output.memory_bars import bar_lines
from dstrain.cli.output.plan import (
    COLUMNS,
    chosen_line,
    plan_document,
    reason_lines,
    subject_lines,
    table_lines,
    wrapped,
)
from dstrain.plan.search.decide import Survey, survey
from dstrain.plan.search.infeasible import does_not_fit
from dstrain.plan.search.search import DEFAULT_TOP


@click.command("plan")
@plan_options
@click.option(
    "--top", type=click.IntRange(min=1), default=DEFAULT_TOP, show_default=True, metavar="K", help="Plans to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
def command(top: int, as_json: bool, **options: Any) -> None:
    """Say what training a model on these GPUs needs, how fast it is, and why. Writes nothing.

    What you give is fixed, the rest is chosen: the fastest way that fits. With stage, offload, micro-batch and
    checkpointing given the answer is an estimate of that, whether it fits or not. Exit code 4 where nothing fits; the
    plans are then those that come nearest.

    \b
    Example:
      dstrain plan --gpus 16 --model qwen3-32b
      dstrain plan --gpus 8 --gpu h100 --model qwen3-8b --zero-stage 2 --json
    """
    asked = plan_inputs(options)
    found = survey(asked.workload, asked.request, top=top)
    if as_json:
        answer_json(plan_document(found, asked.workload))
    else:
        _print(found, asked)
    if not found.fits:
        raise does_not_fit(asked.workload, asked.request, found.first)


def _print(found: Survey, asked: PlanInputs) -> None:
    """Prints bars, table and reasons to stdout: in colour on a terminal, as plain text elsewhere and under NO_COLOR."""
    page = Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False)
    width = min(page.width, 100) if page.is_terminal else COLUMNS
    in_colour = page.is_terminal and not page.no_color
    lines: list[Text | str] = [*subject_lines(asked.workload), wrapped(chosen_line(found), width), ""]
    lines += [*bar_lines(found, asked.workload.cluster, in_colour=in_colour), "", *table_lines(found), ""]
    lines += [wrapped(line, width) for line in reason_lines(found)]
    for line in lines:
        page.print(line, markup=False)
