"""`dstrain status`: shows the state of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json
from dstrain.launch.failure.logs import agents_words, last_metrics, metrics_words
from dstrain.launch.run import state
from dstrain.monitor.health.nonfinite import stop_of
from dstrain.paths import shown
from dstrain.rundir import GONE, LIVING, RunDir, Stage, State, cause_of, resumed
from dstrain.units import format_seconds
from dstrain.wrapping import aligned


@click.command("status")
@click.argument("run_dir", type=click.Path(path_type=Path), default="output")
@click.option(
    "--watch",
    is_flag=True,
    help="Follow the run until it ends: loss, speed against the plan, memory of each rank, health, time left.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="With --watch, seconds between two looks; more if reading the files takes over a tenth of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run_dir: Path, watch: bool, every: float, as_json: bool) -> None:
    """Show the stage of a run, its newest step, checkpoint and error. Exits with 1 if it failed.

    Reads the files of the run directory only, so that it works from any machine that sees them, and over ssh. Ctrl-C
    ends --watch and leaves the run alone.

    \b
    Example:
      dstrain status output
      dstrain status output --watch
      ssh gpu01 dstrain status /data/output --watch
    """
    if watch and as_json:
        raise click.UsageError("--watch prints lines as they come; leave out --json.")
    place = state.folder_of(run_dir)
    if watch:
        from dstrain.cli.watch import follow  # a status needs no report

        if not follow(place, every):
            raise click.exceptions.Exit(1)
        return
    status = document(place, state.read(place))
    if as_json:
        answer_json(status)
    else:
        answer("\n".join(_lines(status)))
    if status["stage"] in {Stage.FAILED.value, GONE}:
        raise click.exceptions.Exit(1)


def document(run_dir: RunDir, run: State) -> dict[str, Any]:
    """Returns the status of a run as JSON-ready data."""
    is_gone = run.stage in LIVING and not state.is_alive(run, run_dir)
    newest = run_dir.newest_checkpoint()
    failure = run_dir.failure.read_text(encoding="utf-8") if run_dir.failure.exists() else None
    cause = cause_of(failure)
    stop = stop_of(run_dir, cause) if cause else None
    return {
        "schema": 1,
        "run_dir": str(run_dir.path),
        "stage": GONE if is_gone else run.stage.value,
        "host": run.host,
        "pid": run.pid,
        "nodes": list(run.nodes),
        "attempt": run.attempt,
        "start": run.start if run.step in {None, 0} and not is_gone else None,
        "began": run.began,
        "beat": run.beat,
        "exit_code": run.exit_code,
        "checkpoint_step": newest.step if newest.folder else None,
        # a run that trains may be writing the newest one
        "damaged": [] if state.is_alive(run, run_dir) else list(newest.skipped),
        "last": last_metrics(run_dir),
        "cause": cause or None,
        "stopped_by": stop and stop.rule,
        "failure": failure,
        "resume": resumed(run.command) if stop is None or stop.since is None else None,
        "agents": agents_words(run_dir.logs, run.began),
    }


def _lines(status: dict[str, Any]) -> list[str]:
    """Returns the status as rows of a name and a value."""
    is_alive = status["stage"] in {stage.value for stage in LIVING}
    # a run that ended wrote its state a last time then
    took = format_seconds((time.time() if is_alive else status["beat"]) - status["began"])
    stage = f"{status['stage']}, {'for' if is_alive else 'after'} {took}"
    if status["stage"] == GONE:
        stage = "gone: `dstrain run` was killed, or its machine went down"
    elif status["stopped_by"]:
        stage = f"ended by the health rule {status['stopped_by']}, after {took}, exit code {status['exit_code']}"
    elif status["exit_code"]:
        stage += f", exit code {status['exit_code']}"
    rows = [("run", shown(status["run_dir"])), ("stage", stage)]
    rows.append(
        ("on", f"{', '.join(status['nodes']) or status['host']} (dstrain run: {status['pid']} on {status['host']})")
    )
    if status["attempt"] > 1:
        rows.append(("starts", str(status["attempt"])))
    if status["start"]:
        rows.append(("start", status["start"]))
    last = status["last"]
    if last is not None:
        rows.append(("step", metrics_words(last)))
    if status["checkpoint_step"] is not None:
        rows.append(("checkpoint", f"step {status['checkpoint_step']}"))
    rows += [("skipped", problem) for problem in status["damaged"]]
    lines = aligned([*rows, *(("agent", line) for line in status["agents"])])
    if status["failure"]:
        lines += ["", status["failure"].rstrip()]
    elif status["stage"] == GONE:
        lines += ["", f"`{status['resume']}` resumes from the newest checkpoint."]
    return lines
