"""`dstrain logs`: prints the logs of the ranks and launchers of a run."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import click

from dstrain.cli.console import answer
from dstrain.errors import InvalidConfig
from dstrain.launch.failure.logs import Tail
from dstrain.launch.run import state
from dstrain.paths import shown
from dstrain.rundir import RunDir

_POLL_S = 0.5
_RANK = re.compile(r"(\d{14})_rank(\d+)\.log")


@click.command("logs")
@click.argument("run_dir", type=click.Path(path_type=Path), default="output")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Rank whose log is printed.")
@click.option("--node", metavar="HOST", help="Print the launcher's log of a node instead.")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the run ends.")
@click.option("-l", "--list", "only_list", is_flag=True, help="List all logs.")
def command(run_dir: Path, rank: int, node: str | None, follow: bool, only_list: bool) -> None:
    """Print the newest log of a rank, or of a node's launcher.

    \b
    Example:
      dstrain logs output -f
      dstrain logs output --rank 9
      dstrain logs output --node gpu02
    """
    place = state.folder_of(run_dir)
    status = state.read(place)
    if only_list:
        answer("\n".join(shown(str(path)) for path in sorted(place.logs.glob("*.log"))))
        return
    tail = Tail(_newest(place, rank, node))
    while True:
        text = tail.read()
        sys.stdout.write(text)
        sys.stdout.flush()
        if not text and not (follow and state.is_alive(status, place)):
            return
        if not text:
            time.sleep(_POLL_S)
            status = state.read(place)


def _newest(run_dir: RunDir, rank: int, node: str | None) -> Path:
    """Returns the newest log. Raises InvalidConfig, with the names of other logs, if it does not exist."""
    every = sorted(run_dir.logs.glob("*.log"))
    if node is not None:
        matching = [path for path in every if f"_{node}_" in path.name]
    else:
        matching = [path for path in every if (match := _RANK.fullmatch(path.name)) and int(match[2]) == rank]
    if matching:
        return matching[-1]
    what = f"node {node}" if node is not None else f"rank {rank}"
    names = ", ".join(path.name for path in every[-6:]) or "none"
    raise InvalidConfig(f"{shown(str(run_dir.logs))}: no log of {what}", hint=f"The newest logs: {names}")
