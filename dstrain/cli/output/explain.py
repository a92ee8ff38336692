"""Formatting shared by explanations of a key and of a file."""

from __future__ import annotations

import re
import textwrap

from dstrain.cli.output.plan import COLUMNS
from dstrain.config.key_bytes import Cost
from dstrain.units import format_bytes

_LEAD = re.compile(r" *(?:\S+ {2,}|not written {2,}|- )?")
"""An indent, with the label or the dash that stands before a text."""
_QUANTITY = re.compile(r"(\d) ([KMGT]?i?B|[KMT]|%|s|GPUs?)(?!\w)")


def wrapped(line: str) -> str:
    """Returns a line wrapped under the text after its label; a number stays with its unit.

    >>> print(wrapped("  type      " + "word " * 16))
      type      word word word word word word word word word word word word word
                word word word
    """
    lead = _LEAD.match(line)
    indent = " " * len(lead[0]) if lead else ""
    whole = _QUANTITY.sub("\\1\xa0\\2", line)
    filled = textwrap.fill(whole, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\xa0", " ")


def said_bytes(took: Cost | None) -> str:
    """Returns what a number takes, in brackets, or nothing."""
    return f" ({format_bytes(took.count_bytes)} {took.where})" if took else ""


def unknown_model(name: str) -> str:
    """Returns why there are no numbers for a model, and where to ask."""
    return f"nothing is known of the model {name}; dstrain plan --model {name} says why"
