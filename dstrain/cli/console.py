"""Output streams: answers go to stdout, messages to stderr."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from dstrain.errors import DstrainError


class PlainConsole(Console):
    """A console that leaves it to `main` how the command ends whose reader is gone; Rich's ends with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError again."""
        raise  # Rich calls it while it handles one


talk = PlainConsole(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""Talk: choices, reasons, progress, errors. Plain text where stderr is not a terminal or NO_COLOR is set."""

COLUMNS = 80
"""Width that output fits where its terminal is not known."""
_MAX_COLUMNS = 100
"""Width beyond which text is hard to read, even on a wider terminal."""
_LEAD = re.compile(r" *(?:\S+(?: \w+)? {2,}|- )?")
"""An indent, with the label or the dash that precedes a text."""
_QUANTITY = re.compile(r"(\d) ([KMGT]?i?B|[KMT]|%|s|GPUs?)(?!\w)")


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


def wrapped(line: str, columns: int = COLUMNS) -> str:
    """Returns a line wrapped under the text after its label or dash; a number stays with its unit.

    >>> print(wrapped("  type      " + "word " * 16))
      type      word word word word word word word word word word word word word
                word word word
    """
    lead = _LEAD.match(line)
    indent = " " * len(lead[0]) if lead else ""
    whole = _QUANTITY.sub("\\1\xa0\\2", line)
    filled = textwrap.fill(whole, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\xa0", " ")


def say(text: str = "", *, style: str | None = None) -> None:
    """Prints one piece of talk; square brackets are text, not markup."""
    talk.print(text, style=style, markup=False)


def complain(error: DstrainError) -> None:
    """Prints an error: what happened, then what to do."""
    say(f"error: {error.problem}".replace("\n", "\n       "), style="red")
    if error.hint is not None:
        say(error.hint)
