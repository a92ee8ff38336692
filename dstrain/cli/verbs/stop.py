"""`dstrain stop`: ends a run."""

from __future__ import annotations

from pathlib import Path

import click

from dstrain.cli.console import say
from dstrain.launch.run import control, state


@click.command("stop")
@click.argument("run_dir", type=click.Path(path_type=Path), default="output")
@click.option("--save", "saves", is_flag=True, help="Save a checkpoint first (only on the machine of `dstrain run`).")
@click.option("--now", "at_once", is_flag=True, help="Kill its ranks at once.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the process that would be ended.")
def command(run_dir: Path, saves: bool, at_once: bool, dry_run: bool) -> None:
    """End a run with all its processes on all nodes, and wait until they are gone.

    \b
    Example:
      dstrain stop output
      dstrain stop output --save
    """
    place = state.folder_of(run_dir)
    status = state.read(place)
    if dry_run:
        is_alive = state.is_alive(status, place)
        say(f"{run_dir}: {'would end' if is_alive else 'nothing to end:'} process {status.pid} on {status.host}")
        return
    stage = control.save_and_leave(place) if saves else control.stop(place, at_once=at_once)
    say(f"{run_dir}: {stage.value}")
