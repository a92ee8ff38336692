"""Wraps text at a width; text to paste, such as a command, stays on one line."""

from __future__ import annotations

import re
import textwrap

COLUMNS = 80
"""Width that output fits where its terminal is not known."""
_LEAD = re.compile(r" *(?:\S+(?: \w+)? {2,}|- )?")
"""An indent, with the label or the dash that precedes a text."""
_QUANTITY = re.compile(r"(\d) ([KMGT]?i?B|[KMT]|%|s|GPUs?)(?!\w)")
_VALUE = r"(?:[ =](?:'[^']*'|[^\s'-]\S*))?"
_OPTION = rf"--?[a-z][\w-]*{_VALUE}"
_TYPED = re.compile(rf"`[^`]*`|(?:dstrain [a-z][\w-]*|(?<!\S){_OPTION})(?: {_OPTION})*")
"""Text to type: in backticks, or a verb and options with their values."""
_NEXT = re.compile(r"next(?: \d+)?: ")
"""Prefix of lines that only hold a command to type."""


def wrapped(line: str, columns: int = COLUMNS, *, indent: str | None = None) -> str:
    """Returns a line wrapped under the text after its label or dash, or with an indent on every line.

    A number stays with its unit. A command, and an option with its value, stay on one line, as long as they may be.

    >>> print(wrapped("  type      " + "word " * 16))
      type      word word word word word word word word word word word word word
                word word word
    >>> print(wrapped("  - " + "word " * 13 + "dstrain plan --model a --seq-len 8192 says more"))
      - word word word word word word word word word word word word word
        dstrain plan --model a --seq-len 8192 says more
    >>> wrapped("next: " + "dstrain " * 20).count("\\n")
    0
    """
    if _NEXT.match(line):
        return line.rstrip()
    lead = _LEAD.match(line) if indent is None else None
    below = (" " * len(lead[0]) if lead else "") if indent is None else indent
    whole = _QUANTITY.sub("\\1\xa0\\2", line)
    whole = _TYPED.sub(lambda typed: typed[0].replace(" ", "\xa0"), whole)
    filled = textwrap.fill(
        whole,
        columns,
        initial_indent=indent or "",
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\xa0", " ")
