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

talk = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""Talk: choices, reasons, progress, errors. Plain text where stderr is not a terminal or NO_COLOR is set."""


_LEAD = re.compile(r"\w+ {2,}|\s*(- )?")
"""What stands before the text of a line: a label and its spaces, or an indent and a dash."""
_QUANTITY = re.compile(r"(\d) ([KMGT]?i?B|[KMT]|%|s|GPUs)\b")


def answer(text: str) -> None:
    """Prints an answer to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def answer_json(data: Any) -> None:
    """Prints an answer as JSON to stdout."""
    answer(json.dumps(data, indent=2, ensure_ascii=False))


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines of talk, long ones wrapped under their own indent at the width of the terminal (80 elsewhere)."""
    width = min(talk.width, 100) if talk.is_terminal else 80
    for line in lines:
        lead = _LEAD.match(line)
        indent = " " * len(lead[0]) if lead else ""
        whole = _QUANTITY.sub("\\1\xa0\\2", line)  # a number stays with its unit
        wrapped = textwrap.fill(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        say(wrapped.replace("\xa0", " "))


def say(text: str = "", *, style: str | None = None) -> None:
    """Prints one piece of talk; square brackets are text, not markup."""
    talk.print(text, style=style, markup=False)


def complain(error: DstrainError) -> None:
    """Prints an error: what happened, then what to do."""
    say(f"error: {error.problem}".replace("\n", "\n       "), style="red")
    if error.hint is not None:
        say(error.hint)
