"""`dstrain status`: shows the state of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json
from dstrain.launch.failure.last_metrics import last_metrics, metrics_words
from dstrain.launch.run import state
from dstrain.launch.run.state import LIVING, Stage, State
from dstrain.paths import shown
from dstrain.rundir import RunDir
from dstrain.units import format_seconds

NOT_ALIVE = "gone"
"""Stage of a run whose process ended without recording its exit."""


@click.command("status")
@click.argument("run_dir", type=click.Path(path_type=Path), default="output")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run_dir: Path, as_json: bool) -> None:
    """Show the stage of a run, its newest step, checkpoint and error. Exits with 1 if it failed.

    \b
    Example:
      dstrain status output
    """
    place = state.folder_of(run_dir)
    found = document(place, state.read(place))
    if as_json:
        answer_json(found)
    else:
        answer("\n".join(_lines(found)))
    if found["stage"] in {Stage.FAILED.value, NOT_ALIVE}:
        raise click.exceptions.Exit(1)


def document(run_dir: RunDir, found: State) -> dict[str, Any]:
    """Returns the status of a run as JSON-ready data."""
    is_gone = found.stage in LIVING and not state.is_alive(found, run_dir)
    newest = run_dir.newest_checkpoint()
    failure = run_dir.failure.read_text(encoding="utf-8") if run_dir.failure.exists() else None
    return {
        "schema": 1,
        "run_dir": str(run_dir.path),
        "stage": NOT_ALIVE if is_gone else found.stage.value,
        "host": found.host,
        "pid": found.pid,
        "nodes": list(found.nodes),
        "attempt": found.attempt,
        "start": found.start if found.step in {None, 0} and not is_gone else None,
        "began": found.began,
        "beat": found.beat,
        "exit_code": found.exit_code,
        "checkpoint_step": newest.step if newest.folder else None,
        "damaged": [] if state.is_alive(found, run_dir) else list(newest.skipped),
        "last": last_metrics(run_dir),
        "failure": failure,
        "agents": state.watch_words(run_dir, found.began),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    """Returns the status as rows of a name and a value."""
    is_alive = found["stage"] in {stage.value for stage in LIVING}
    took = format_seconds((time.time() if is_alive else found["beat"]) - found["began"])
    stage = f"{found['stage']}, {'for' if is_alive else 'after'} {took}"
    if found["stage"] == NOT_ALIVE:
        stage = "gone: `dstrain run` was killed, or its machine went down"
    elif found["exit_code"]:
        stage += f", exit code {found['exit_code']}"
    rows = [("run", shown(found["run_dir"])), ("stage", stage)]
    rows.append(
        ("on", f"{', '.join(found['nodes']) or found['host']} (dstrain run: {found['pid']} on {found['host']})")
    )
    if found["attempt"] > 1:
        rows.append(("starts", str(found["attempt"])))
    if found["start"]:
        rows.append(("start", found["start"]))
    last = found["last"]
    if last is not None:
        rows.append(("step", metrics_words(last)))
    if found["checkpoint_step"] is not None:
        rows.append(("checkpoint", f"step {found['checkpoint_step']}"))
    rows += [("skipped", problem) for problem in found["damaged"]]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"{'agent':<{width}}  {line}" for line in found["agents"]]
    if found["failure"]:
        lines += ["", found["failure"].rstrip()]
    elif found["stage"] == NOT_ALIVE:
        lines += ["", "`dstrain run --set resume=auto` resumes from the newest checkpoint."]
    return lines
