"""`dstrain plan`: estimates one configuration or finds the best one; writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from dstrain.cli.console import PlainConsole, answer_json, check_page, say_lines, width, write_page
from dstrain.cli.group import Sectioned
from dstrain.cli.options import data_lengths
from dstrain.cli.options.planning import DATA, GENERATED, HTML, SECTIONS, plan_options
from dstrain.cli.options.question import PlanInputs, plan_inputs
from dstrain.cli.options.typed import spelled, typed
from dstrain.cli.output import plan_page
from dstrain.cli.output.plan import (
    bar_lines,
    chosen_line,
    closing_lines,
    data_lines,
    plan_document,
    subject_lines,
    table_lines,
)
from dstrain.plan.search.decide import Survey, survey
from dstrain.plan.search.infeasible import does_not_fit
from dstrain.plan.search.search import DEFAULT_TOP
from dstrain.wrapping import wrapped


@click.command("plan", cls=Sectioned, sections=SECTIONS)
@plan_options
@DATA
@click.option(
    "--top", type=click.IntRange(min=1), default=DEFAULT_TOP, show_default=True, metavar="K", help="Plans to show."
)
@click.option("-v", "--verbose", is_flag=True, help="Print every reason, and the memory of each plan as a bar.")
@HTML
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
def command(top: int, verbose: bool, html: Path | None, as_json: bool, **options: Any) -> None:
    """Say what training a model on these GPUs needs, how fast it is, and why. Writes nothing but the page of --html.

    Options that you give are fixed, the rest is chosen: the fastest way that fits. With stage, offload, micro-batch and
    checkpointing given the answer is an estimate of that, whether it fits or not. Exit code 4 if nothing fits; the
    plans are then those that come nearest.

    \b
    Example:
      dstrain plan --gpus 16 --model qwen3-32b
      dstrain plan --gpus 8 --gpu h100 --model ./model --data 'chats/*.jsonl'
      dstrain plan --gpus 8 --gpu h100 --model qwen3-8b --zero-stage 2 --json
    """
    if html is not None:
        check_page(html, "plan")
    inputs = plan_inputs(options)
    data = data_lengths.read(options, inputs.workload.model)
    inputs = data.decide(inputs)
    plans = survey(inputs.workload, inputs.request, top=top)
    ways = () if plans.fits else data_lengths.ways(options, inputs, data)
    trained = data.run_time(inputs.workload, plans.first)
    if as_json:
        answer_json({**plan_document(plans, inputs.workload), **data.document(trained)})
    else:
        # printed even if nothing fits: then these plans come nearest
        _print(plans, inputs, data_lines(data, trained, inputs), verbose=verbose)
    if html is not None:
        asked = plan_page.Question(verb="plan", typed=typed(options), inputs=inputs)
        write_page(html, plan_page.page(plans, asked, ways, name=html.name))
    if not plans.fits:
        raise does_not_fit(inputs.workload, inputs.request, plans.first, ways)
    if not as_json:
        say_lines(_next_lines(options))


def _print(plans: Survey, inputs: PlanInputs, data: Sequence[str], *, verbose: bool) -> None:
    """Prints table and reasons to stdout, and bars if verbose; colors only on a terminal and without NO_COLOR."""
    page = PlainConsole(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False)
    columns, in_colour = width(page), page.is_terminal and not page.no_color
    bars: list[Text | str] = [*bar_lines(plans, inputs.workload.cluster, in_colour=in_colour), ""] if verbose else []
    about_data = [wrapped(line, columns) for line in data]
    lines = [*subject_lines(inputs.workload), wrapped(chosen_line(plans), columns), *about_data, "", *bars]
    lines += [*table_lines(plans), ""]
    lines += [wrapped(line, columns) for line in closing_lines(plans, verbose=verbose)]
    for line in lines:
        page.print(line, markup=False)


def _next_lines(options: dict[str, Any]) -> list[str]:
    """Returns the command that writes the first plan, unless gen-config lacks one of the options."""
    given = typed(options)
    if not GENERATED.issuperset(given) or data_lengths.is_job_file(given.get("data", "")):
        return []
    return ["", f"next: dstrain gen-config {spelled(given)}"]
