"""Prints conflicts with hand edits as a table, and asks how to settle one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import click

from dstrain.cli.console import say
from dstrain.config.document import REMOVED, dotted, same
from dstrain.config.edits.manual_edits import values
from dstrain.config.edits.merge import Clash
from dstrain.config.edits.regenerate import Conflicting, Decide, Decision

_WIDTH = 24
"""Characters of one value in the table; longer ones are cut."""


class OnConflict(StrEnum):
    """What is to be done about keys that you and dstrain both changed."""

    KEEP = "keep"
    NEW = "new"
    ASK = "ask"


def decider(chosen: OnConflict | None) -> Decide:
    """Returns what decides a conflict. Raises UsageError for a question where nobody can answer."""
    if chosen is OnConflict.ASK:
        if not sys.stdin.isatty():
            raise click.UsageError("--on-conflict ask needs a terminal; write --on-conflict keep or new.")
        return _ask
    decision = {None: Decision.OPEN, OnConflict.KEEP: Decision.KEEP, OnConflict.NEW: Decision.NEW}[chosen]
    return lambda file, clash: decision


def _ask(file: str, clash: Clash) -> Decision:
    """Asks on the terminal whose value is to stand."""
    say(f"{file}: {dotted(clash.pointer)}: yours is {shown(clash.yours)}, dstrain's is {shown(clash.new)}")
    say(f"  {_why(clash)}")
    answer = click.prompt("  keep yours or take the new", type=click.Choice(["keep", "new"]), default="keep", err=True)
    return Decision(answer)


def table_lines(conflicts: Sequence[Conflicting]) -> list[str]:
    """Returns the table of conflicts: key, yours, new and why, one file after another."""
    rows = [("key", "yours", "new", "why")]
    for each in conflicts:
        clash = each.clash
        rows.append((dotted(clash.pointer), shown(clash.yours), shown(clash.new), _why(clash)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    found: list[str] = []
    for name in dict.fromkeys(each.file for each in conflicts):
        own = [line for line, each in zip(lines[1:], conflicts, strict=True) if each.file == name]
        found += [name, *(f"  {line}" for line in (lines[0], *own))]
    return found


def document(conflicts: Sequence[Conflicting]) -> list[dict[str, Any]]:
    """Returns conflicts as JSON; a value that is not there has no key."""
    return [
        {
            "file": each.file,
            "key": dotted(each.clash.pointer),
            "pointer": list(each.clash.pointer),
            "decision": each.decision,
            **values(base=each.clash.base, yours=each.clash.yours, new=each.clash.new),
        }
        for each in conflicts
    ]


def shown(value: Any) -> str:
    """Returns a value on one line, cut where it is long.

    >>> shown(REMOVED), shown({"a": [1, 2]}), shown("x" * 30)
    ('(none)', '{"a": [1, 2]}', '"xxxxxxxxxxxxxxxxxxxxxx…')
    """
    text = "(none)" if value is REMOVED else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _why(clash: Clash) -> str:
    if same(clash.base, clash.yours):
        return "dstrain would add it" if clash.yours is REMOVED else "it was adopted"
    if clash.base is REMOVED:
        return "neither was there before"
    if clash.yours is REMOVED:
        return f"you removed {shown(clash.base)}"
    return f"it was {shown(clash.base)}"
