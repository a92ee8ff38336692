"""Lays out text: wraps it at a width, with text to paste on one line, and aligns the columns of tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Sequence

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
    # textwrap does not break at a no-break space
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


def aligned(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Returns rows of cells as lines, in columns; the columns `right` are aligned to the right.

    >>> aligned([("step", "9"), ("loss", "1.25")], right={1})
    ['step     9', 'loss  1.25']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
