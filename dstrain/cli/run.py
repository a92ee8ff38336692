"""`dstrain run`: check a job, launch DeepSpeed on it, and say how it went."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.run_text import before_lines, summary, summary_text
from dstrain.errors import DstrainError
from dstrain.jobfile import read_job
from dstrain.launch import preflight
from dstrain.launch.begin import Launch, build_ops, plan_launch, start, write_run_dir
from dstrain.launch.explain import explain
from dstrain.launch.linting import check_rules
from dstrain.launch.prepare import prepare
from dstrain.render.manual import Edit, of_run


@click.command("run", short_help="Train as a job file says.")
@click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a line of the job, such as learning_rate=1e-5.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile to use in place of the job's.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Port of rank 0.  [default: 29500, or a free one]")
@click.option("--ignore", "ignored", multiple=True, metavar="RULE", help="A rule of lint to leave out, such as DS802.")
@click.option("-n", "--dry-run", is_flag=True, help="Check everything, print the command, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON to stdout.")
def command(
    job: Path,
    overrides: tuple[str, ...],
    hostfile: Path | None,
    master_port: int | None,
    ignored: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train as a job file says, on this machine or over its hostfile.

    Lints the configuration first, and starts nothing where it finds an error. Precedence, strongest first: --set and
    --hostfile, the job file, the defaults. The job's output_dir is the run directory; `bash OUTPUT_DIR/start.sh` starts
    the same run again by hand.

    \b
    Example:
      dstrain run
      dstrain run job.yaml --set learning_rate=1e-5 --set resume=auto
    """
    given = [*overrides, *([f"hostfile={hostfile.resolve()}"] if hostfile else [])]
    check_rules(ignored)
    prepared = prepare(read_job(job, given), os.environ, ignored=ignored)
    launch = plan_launch(prepared, master_port=preflight.port(master_port, os.environ))
    say_lines(before_lines(prepared))
    if not prepared.is_local:
        preflight.require_pdsh(os.environ)
    if dry_run:
        preflight.check_checkpoints(prepared.run_dir, resume=prepared.job.resume)
        _answer_dry(launch, as_json=as_json)
        return
    preflight.check(prepared.run_dir, resume=prepared.job.resume, needed_bytes=_checkpoint_bytes(launch))
    write_run_dir(launch, _edits(job, launch))
    build_ops(launch, say)
    outcome = start(launch, _pass_on)
    if not outcome.succeeded:
        raise explain(outcome, hosts=prepared.hosts, run_dir=prepared.run_dir)
    found = summary(prepared.run_dir)
    say(summary_text(found, prepared.run_dir))
    if as_json:
        answer_json(found)


def _answer_dry(launch: Launch, *, as_json: bool) -> None:
    if as_json:
        path = str(launch.prepared.run_dir.path)
        answer_json({"schema": 1, "run_dir": path, "command": launch.command})
    else:
        answer(shlex.join(launch.command))


def _edits(path: Path, launch: Launch) -> list[Edit] | None:
    """Returns what was edited by hand in the files of the run; None where that is not known."""
    job = launch.prepared.job
    names = [str(path), job.ds_config, *([job.hostfile] if job.hostfile else [])]
    try:
        return of_run([Path(name).resolve() for name in names])
    except DstrainError as error:
        say(f"hand edits are not on record: {error.problem}")
        return None


def _checkpoint_bytes(launch: Launch) -> int:
    """Returns the disk that one more checkpoint takes."""
    needs = launch.prepared.estimate
    return needs.memory.checkpoint_bytes if needs else 0


def _pass_on(text: str) -> None:
    """Passes on what rank 0 writes."""
    sys.stderr.write(text)
    sys.stderr.flush()
