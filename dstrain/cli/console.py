"""What is printed and where: answers to stdout, talk to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from dstrain.errors import DstrainError

talk = Console(stderr=True, highlight=False, soft_wrap=True)
"""Talk: choices, reasons, progress, errors. Plain text where stderr is not a terminal or NO_COLOR is set."""


def answer(text: str) -> None:
    """Prints an answer to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def answer_json(data: Any) -> None:
    """Prints an answer as JSON to stdout."""
    answer(json.dumps(data, indent=2, ensure_ascii=False))


def say(text: str = "", *, style: str | None = None) -> None:
    """Prints one piece of talk; square brackets are text, not markup."""
    talk.print(text, style=style, markup=False)


def complain(error: DstrainError) -> None:
    """Prints an error: what happened, then what to do."""
    lines = error.problem.split("\n")
    say(f"error: {lines[0]}", style="red")
    for line in lines[1:]:
        say(f"       {line}", style="red")
    if error.hint is not None:
        say(error.hint)
