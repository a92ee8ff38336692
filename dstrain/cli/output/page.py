"""Writes HTML pages: one file each that needs nothing else, in English and Chinese, light and dark."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.cli.console import say
from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.paths import write_atomic


def signature(kind: str) -> str:
    """Returns the beginning of a page of a kind, `plan` or `report`; only a file that begins so is replaced."""
    return f"<!doctype html>\n<!-- dstrain {kind} -->\n"


def render(kind: str, data: Mapping[str, Any]) -> str:
    """Returns the page that the template of a kind makes from its data."""
    from dstrain.config.templates.templates import render_page  # Jinja is needed only where a page is written

    return render_page(Path(__file__).with_name(f"page.{kind}.html.j2"), {"data": data, "kind": kind})


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
