"""Output streams: answers go to stdout, messages to stderr, pages to the files of `--html`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from dstrain.errors import Conflict, DstrainError, EnvironmentProblem
from dstrain.paths import write_atomic
from dstrain.report.html import signature
from dstrain.wrapping import COLUMNS, wrapped


class PlainConsole(Console):
    """A console that leaves it to `main` how the command ends whose reader is gone; Rich's ends with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError again."""
        raise  # Rich calls it while it handles one


talk = PlainConsole(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""Talk: choices, reasons, progress, errors. Plain text where stderr is not a terminal or NO_COLOR is set."""

_MAX_COLUMNS = 100
"""Width beyond which text is hard to read, even on a wider terminal."""


def answer(text: str) -> None:
    """Prints an answer to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def answer_json(data: Any) -> None:
    """Prints an answer as JSON to stdout."""
    answer(json.dumps(data, indent=2, ensure_ascii=False))


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines of talk, wrapped at the width of the terminal."""
    for line in lines:
        say(wrapped(line, width(talk)))


def say_unread_links() -> None:
    """Says that the file of measured links cannot be read, if so; estimates then use other links."""
    from dstrain.facts.cluster import measured_links

    problem = measured_links.read()[1]
    if problem is not None:
        say_lines([f"note: {problem}"])


def width(console: Console) -> int:
    """Returns the columns to wrap at."""
    return min(console.width, _MAX_COLUMNS) if console.is_terminal else COLUMNS


def say(text: str = "", *, style: str | None = None) -> None:
    """Prints one piece of talk; square brackets are text, not markup."""
    talk.print(text, style=style, markup=False)


def complain(error: DstrainError) -> None:
    """Prints an error: the problem, then the hint."""
    say(f"error: {error.problem}".replace("\n", "\n       "), style="red")
    if error.hint is not None:
        say(error.hint)


def check_page(path: Path, kind: str) -> None:
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


def write_page(path: Path, text: str) -> None:
    """Writes a page and prints that."""
    write_atomic(path, text)
    say(f"wrote {path}: open it in a browser")
