"""`dstrain report`: says what became of a run, and how far it was from its plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json, check_page, say, write_page
from dstrain.errors import Conflict, DstrainError
from dstrain.facts.cluster.calibration import DEFAULT_PATH
from dstrain.launch.run import state
from dstrain.monitor.run_record import read
from dstrain.paths import shown, write_atomic
from dstrain.records import load_json
from dstrain.report import share as sharing
from dstrain.report import text
from dstrain.report.report import Report, report
from dstrain.report.share import SharedRun


@click.command("report")
@click.argument("run_dirs", metavar="RUN [RUN2 ...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with curves to this file as well.")
@click.option(
    "--share",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Print a record of about a kilobyte without names, and write it to this file; `-` only prints it.",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Fit the planner's constants to what the runs measured, for the next plans; RUN may be a shared record, too.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"With --calibrate: the file.  [default: {DEFAULT_PATH}, which all plans read]",
)
@click.option("-n", "--dry-run", is_flag=True, help="With --calibrate: print the result; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run_dirs: tuple[Path, ...], calibrate: bool, output: Path | None, dry_run: bool, **typed: Any) -> None:
    """Say how a run ended, how far it was from its plan, and what happened on the way; several runs side by side.

    RUN is a run directory, by default `output`. Reads files only, so that it works while a run trains, after it failed,
    and on a copy. Speeds are medians over the logged windows after warm-up, bytes are the largest of all ranks.

    With --calibrate, runs that differ in model, sequence length or ZeRO stage tell more constants apart. Constants
    that they cannot tell stay as they are, and the run that would tell most is named.

    \b
    Example:
      dstrain report output
      dstrain report output-1e-5 output-2e-5
      dstrain report output --html report.html
      dstrain report output --share -
      dstrain report output-1 output-2 output-3 --calibrate
    """
    paths = run_dirs or (Path("output"),)
    if not calibrate:
        if output is not None or dry_run:
            raise click.UsageError("-o and -n go with --calibrate.")
        _report(paths, **typed)
        return
    if typed["html"] is not None or typed["share"] is not None:
        raise click.UsageError("--calibrate writes no page and no record: leave out --html and --share.")
    from dstrain.cli.calibrate import calibrate as fit  # it brings the planner

    fit(paths, output, dry_run=dry_run, as_json=typed["as_json"])


def _report(paths: Sequence[Path], *, html: Path | None, share: Path | None, as_json: bool) -> None:
    """Prints the reports of runs, or shares one."""
    if html is not None:
        check_page(html, "report")
    now = time.time()
    reports = [report(read(state.folder_of(path)), now=now) for path in paths]
    if html is not None:
        from dstrain.report import page as report_page

        write_page(html, report_page.page(reports))
    if share is not None:
        _share(reports, share)
    elif as_json:
        answer_json({"schema": 1, "runs": [text.document(one) for one in reports]})
    else:
        several = len(reports) > 1
        answer("\n".join(text.side_by_side_lines(text.side_by_side(reports)) if several else text.lines(reports[0])))


def _share(reports: Sequence[Report], path: Path) -> None:
    """Prints the record of a run, then writes it unless it is only to be printed."""
    if len(reports) > 1:
        raise click.UsageError("--share takes one run: a record is of one")
    text = sharing.text(sharing.shared(reports[0]))
    answer(text.rstrip())
    if str(path) == "-":
        say(f"{len(text.encode()):,} bytes; nothing was written: name a file with --share to write them")
        return
    if path.exists() and not _is_record(path):
        hint = "Name another file with --share, or remove this one."
        raise Conflict(f"--share {path}: exists, and is no shared record; nothing was written", hint=hint)
    write_atomic(path, text)
    say(f"wrote {shown(str(path))}, {len(text.encode()):,} bytes: `dstrain report --calibrate` reads such files")


def _is_record(path: Path) -> bool:
    try:
        load_json(SharedRun, path)
    except DstrainError:
        return False
    return True
