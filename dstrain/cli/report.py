"""`dstrain report`: says what became of a run, and how far it was from its plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.output import page, report_table
from dstrain.cli.output import report as text
from dstrain.errors import Conflict, DstrainError
from dstrain.launch.run import state
from dstrain.monitor.shared_run import SharedRun
from dstrain.paths import shown, write_atomic
from dstrain.records import load_json
from dstrain.report import share as sharing
from dstrain.report.recorded import read
from dstrain.report.report import Report, report


@click.command("report")
@click.argument("run_dirs", metavar="RUN [RUN2 ...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with curves to this file as well.")
@click.option(
    "--share",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Print a record of about a kilobyte without names, and write it to this file; `-` only prints it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run_dirs: tuple[Path, ...], html: Path | None, share: Path | None, as_json: bool) -> None:
    """Say how a run ended, how far it was from its plan, and what happened on the way; several runs side by side.

    RUN is a run directory, by default `output`. Reads files only, so that it works while a run trains, after it failed,
    and on a copy. Speeds are medians over the logged windows after warm-up, bytes are the largest of all ranks.

    \b
    Example:
      dstrain report output
      dstrain report output-1e-5 output-2e-5
      dstrain report output --html report.html
      dstrain report output --share -
    """
    if html is not None:
        page.check(html, "report")
    now = time.time()
    reports = [report(read(state.folder_of(path)), now=now) for path in run_dirs or (Path("output"),)]
    if html is not None:
        from dstrain.cli.output import report_page

        page.write(html, report_page.page(reports))
    if share is not None:
        _share(reports, share)
    elif as_json:
        answer_json({"schema": 1, "runs": [text.document(one) for one in reports]})
    else:
        several = len(reports) > 1
        answer("\n".join(report_table.lines(report_table.table(reports)) if several else text.lines(reports[0])))


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
    say(f"wrote {shown(str(path))}, {len(text.encode()):,} bytes: `dstrain calibrate` reads such files")


def _is_record(path: Path) -> bool:
    try:
        load_json(SharedRun, path)
    except DstrainError:
        return False
    return True
