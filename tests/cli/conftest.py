"""Runs the command line as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]


def lay_traps(folder: Path) -> None:
    """Writes what a stranger's folder may hold: modules with the names of those that Python is about to import."""
    folder.mkdir(exist_ok=True)
    for name in ("torch", "psutil", "click", "json", "pydantic", "deepspeed", "dstrain"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the folder's own {name}.py was run')\n")


@pytest.fixture
def dstrain(tmp_path: Path) -> Callable[..., Done]:
    """Returns a function that types a dstrain command in a folder of the test's own, on a machine without GPUs."""

    def type_(*words: str, cwd: Path = tmp_path, **variables: str) -> Done:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **variables}
        command = [sys.executable, "-P", "-m", "dstrain.cli", *words]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)

    return type_
