"""Checks before a launch: folders, disk space, and earlier checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.rundir import RunDir
from dstrain.units import format_bytes


def check(run_dir: RunDir, *, resume: str, needed_bytes: int) -> None:
    """Raises the right DstrainError when the run directory cannot take this run; creates the folder."""
    check_checkpoints(run_dir, resume=resume)
    check_writable(run_dir.path)
    check_disk(run_dir.path, needed_bytes=needed_bytes)


def check_dry(run_dir: RunDir, *, resume: str, needed_bytes: int) -> None:
    """Raises what `check` would, as far as that can be known without creating the folder."""
    check_checkpoints(run_dir, resume=resume)
    folder = run_dir.path
    while not folder.exists():
        folder = folder.parent
    check_writable(folder, name=run_dir.path)
    check_disk(folder, needed_bytes=needed_bytes)


def check_checkpoints(run_dir: RunDir, *, resume: str) -> None:
    """Raises Conflict when checkpoints of an earlier run lie there and this one would not go on from them."""
    found = run_dir.checkpoints()
    if found and resume == "never":
        raise Conflict(
            f"{run_dir.path} holds checkpoints up to step {found[-1][0]} of an earlier run",
            hint="To go on from there: dstrain run --set resume=auto. To start anew, name another output_dir.",
        )


def check_writable(folder: Path, *, name: Path | None = None) -> None:
    """Creates the folder; raises EnvironmentProblem when that, or writing into it, is not possible.

    `name` is what is to be made in it, where that is not the folder itself.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "Name another output_dir, or change the folder's owner or mode."
        raise EnvironmentProblem(f"output_dir {name or folder} cannot be written: {reason}", hint=hint) from error


def check_disk(folder: Path, *, needed_bytes: int) -> None:
    """Raises EnvironmentProblem when a checkpoint of `needed_bytes` does not fit the disk."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise EnvironmentProblem(
            f"{folder}: {format_bytes(free_bytes)} are free, and one checkpoint takes {format_bytes(needed_bytes)}",
            hint="Free some space, or name an output_dir on a larger disk.",
        )
