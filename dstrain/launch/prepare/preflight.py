"""Checks before a launch: folders, disk space, and earlier checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.rundir import RunDir
from dstrain.units import format_bytes


def check(run_dir: RunDir, *, resume: str, needed_bytes: int) -> None:
    """Creates the run directory. Raises Conflict or EnvironmentProblem if this run cannot use it."""
    check_checkpoints(run_dir, resume=resume)
    check_writable(run_dir.path)
    check_disk(run_dir.path, needed_bytes=needed_bytes)


def check_dry(run_dir: RunDir, *, resume: str, needed_bytes: int) -> None:
    """Raises the errors of `check` that can be detected without creating the folder."""
    check_checkpoints(run_dir, resume=resume)
    folder = existing(run_dir.path)
    check_writable(folder, name=run_dir.path)
    check_disk(folder, needed_bytes=needed_bytes)


def existing(folder: Path) -> Path:
    """Returns a folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_checkpoints(run_dir: RunDir, *, resume: str) -> None:
    """Raises Conflict if there are checkpoints of an earlier run that this one does not resume from."""
    checkpoints = run_dir.checkpoints()
    if checkpoints and resume == "never":
        raise Conflict(
            f"{run_dir.path} holds checkpoints up to step {checkpoints[-1][0]} of an earlier run",
            hint="To resume from there, add --set resume=auto to the command; to start over, --set output_dir=OTHER.",
        )


def check_writable(folder: Path, *, name: Path | None = None) -> None:
    """Creates the folder. Raises EnvironmentProblem if it cannot be created or written to.

    `name` is the folder that the error names, if it is another one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "Set another output_dir, or change the owner or mode of the folder."
        raise EnvironmentProblem(f"output_dir {name or folder} cannot be written: {reason}", hint=hint) from error


def check_disk(folder: Path, *, needed_bytes: int) -> None:
    """Raises EnvironmentProblem if a checkpoint of `needed_bytes` does not fit on the disk."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise EnvironmentProblem(
            f"{folder}: {format_bytes(free_bytes)} free; one checkpoint needs {format_bytes(needed_bytes)}",
            hint="Free some space, or set an output_dir on a larger disk.",
        )
