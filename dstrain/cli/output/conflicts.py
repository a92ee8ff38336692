"""Prints conflicts with hand edits as a table, and asks how to settle one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from dstrain.cli.console import say
from dstrain.cli.types import OnConflict
from dstrain.config.document import REMOVED, dotted, same
from dstrain.config.edits.manual_edits import values
from dstrain.config.edits.regenerate import Clash, Conflicting, Decide, Decision

_WIDTH = 24
"""Characters of one value in the table; longer ones are cut."""


def decider(chosen: OnConflict | None) -> Decide:
    """Returns the function that decides a conflict. Raises UsageError if it would ask and stdin is no terminal."""
    if chosen is OnConflict.ASK:
        if not sys.stdin.isatty():
            raise click.UsageError("--on-conflict ask needs a terminal; write --on-conflict keep or new.")
        return _ask
    decision = {None: Decision.OPEN, OnConflict.KEEP: Decision.KEEP, OnConflict.NEW: Decision.NEW}[chosen]
    return lambda file, clash: decision


def _ask(file: str, clash: Clash) -> Decision:
    """Asks on the terminal whose value to take."""
    say(f"{file}: {dotted(clash.pointer)}: yours is {shown(clash.yours)}, dstrain's is {shown(clash.new)}")
    say(f"  {_why(clash)}")
    answer = click.prompt("  keep yours or take the new", type=click.Choice(["keep", "new"]), default="keep", err=True)
    return Decision(answer)


def table_lines(conflicts: Sequence[Conflicting]) -> list[str]:
    """Returns the table of conflicts: key, yours, new and why, one file after another."""
    clashes = [conflict.clash for conflict in conflicts]
    rows = [("key", "yours", "new", "why")]
    rows += [(dotted(clash.pointer), shown(clash.yours), shown(clash.new), _why(clash)) for clash in clashes]
    widths = [*(max(len(row[column]) for row in rows) for column in range(3)), 0]
    head, *lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    table: list[str] = []
    for name in dict.fromkeys(conflict.file for conflict in conflicts):
        own = [line for line, conflict in zip(lines, conflicts, strict=True) if conflict.file == name]
        table += [name, *(f"  {line}" for line in (head, *own))]
    return table


def document(conflicts: Sequence[Conflicting]) -> list[dict[str, Any]]:
    """Returns conflicts as JSON; a missing value has no key."""
    return [
        {
            "file": conflict.file,
            "key": dotted(conflict.clash.pointer),
            "pointer": list(conflict.clash.pointer),
            "decision": conflict.decision,
            **values(base=conflict.clash.base, yours=conflict.clash.yours, new=conflict.clash.new),
        }
        for conflict in conflicts
    ]


def shown(value: Any) -> str:
    """Returns a value on one line, cut if it is long.

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
