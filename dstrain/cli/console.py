"""Output streams: answers go to stdout, messages to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from dstrain.errors import DstrainError
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
    """Prints an error: what happened, then what to do."""
    say(f"error: {error.problem}".replace("\n", "\n       "), style="red")
    if error.hint is not None:
        say(error.hint)
