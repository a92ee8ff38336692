"""Writes HTML pages to the files that `--html` names."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from dstrain.cli.console import say
from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.paths import write_atomic
from dstrain.report.html import signature


def check(path: Path, kind: str) -> None:
    """Raises EnvironmentProblem if a page of a kind cannot be written there, Conflict if another file exists."""
    try:
        if not path.parent.is_dir():
            hint = f"mkdir -p {shlex.quote(str(path.parent))}"
            raise EnvironmentProblem(f"--html {path}: the folder {path.parent} does not exist", hint=hint)
        if not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):
            raise EnvironmentProblem(f"--html {path}: cannot be written", hint="Name another file with --html.")
        beginning = path.read_bytes()[: len(signature(kind))] if path.exists() else b""
    except OSError as error:
        problem = f"--html {path}: {error.strerror or error}"
        raise EnvironmentProblem(problem, hint="Name another file with --html.") from None
    if beginning not in (b"", signature(kind).encode()):
        raise Conflict(
            f"--html {path}: exists, and is no page of dstrain {kind}; nothing was written",
            hint="Name another file with --html, or remove this one.",
        )


def write(path: Path, text: str) -> None:
    """Writes a page and prints that."""
    write_atomic(path, text)
    say(f"wrote {path}: open it in a browser")
