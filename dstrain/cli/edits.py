"""Hand edits: their effects on memory and speed, conflicts, and how to settle one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrain.cli.console import answer, answer_json, say, say_unread_links
from dstrain.cli.types import OnConflict
from dstrain.config.edits.lock import LOCK, read_lock, standing
from dstrain.config.edits.regenerate import Clash, Conflicting, Decide, Decision, manual_edits, values
from dstrain.config.edits.regenerate import document as manual_document
from dstrain.config.jsonc import REMOVED, dotted, same
from dstrain.config.key_bytes import Cost
from dstrain.errors import InvalidConfig
from dstrain.plan.estimate_records import Effect
from dstrain.units import GIB, counted, format_bytes
from dstrain.wrapping import aligned

if TYPE_CHECKING:
    from dstrain.launch.prepare.edit_effects import Effects, Measured


def explain_edits(folder: Path, *, as_json: bool) -> None:
    """Prints each edit with its effect on memory and speed, alone and all together, and what lint finds at it."""
    from dstrain.launch.prepare.edit_effects import effects  # conflicts need no estimate

    lock = read_lock(folder)
    if lock is None:
        raise InvalidConfig(
            f"{folder / LOCK}: no such file, so edits are unknown",
            hint="dstrain gen-config writes it; for your own files, dstrain gen-config --adopt does.",
        )
    edits = manual_edits(folder, lock)
    gone = [name for name in lock.base if name not in standing(folder, lock.base)]
    result = effects(folder, lock, edits)
    if edits:
        say_unread_links()
    if as_json:
        answer_json(_document(folder, result, gone))
        return
    for name in gone:
        answer(f"{folder / name}: removed; gen-config writes it again")
    if not edits and not gone:
        answer("no edits since the files were generated")
        return
    for line in _lines(folder, result):
        answer(line)
    if result.reason is not None:
        say(f"no estimate: {result.reason}")
    if result.num_errors:
        say(f"the files have {counted(result.num_errors, 'error')}: dstrain lint shows them")


def _lines(folder: Path, result: Effects) -> list[str]:
    """Returns the edits by file with their effects, and the effect of all edits together."""
    rows = [
        (measured, f"{dotted(measured.edit.pointer)} {shown(measured.edit.base)} → {shown(measured.edit.yours)}")
        for measured in result.edits
    ]
    lines: list[str] = []
    for name in dict.fromkeys(measured.edit.file for measured, _ in rows):
        lines.append(str(folder / name))
        lines += [f"  {text}{_edit_text(measured)}" for measured, text in rows if measured.edit.file == name]
    if result.together is not None:
        others = [dotted(measured.edit.pointer) for measured in result.edits if measured.effect is None]
        without = f", without {', '.join(others)}" if others else ""
        lines.append(f"all together{without}: {effect_text(result.together)}")
    return lines


def _edit_text(measured: Measured) -> str:
    if measured.effect is not None:
        return f": {effect_text(measured.effect)}{f' ({measured.note})' if measured.note else ''}"
    return "" if measured.note is None else f": {measured.note}"


def _document(folder: Path, result: Effects, gone: list[str]) -> dict[str, Any]:
    listed = [
        {**row, "effect": asdict(measured.effect) if measured.effect else None, "note": measured.note}
        for row, measured in zip(
            manual_document([measured.edit for measured in result.edits]), result.edits, strict=True
        )
    ]
    return {
        "schema": 1,
        "folder": str(folder),
        "edits": listed,
        "removed_files": gone,
        "together": asdict(result.together) if result.together else None,
        "reason": result.reason,
        "num_errors": result.num_errors,
    }


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
    head, *lines = aligned(rows)
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


def effect_text(effect: Effect) -> str:
    """Returns an effect in words.

    >>> effect_text(Effect(device_bytes_per_gpu=-429496730, host_bytes_per_node=0, step_ratio=0.06, tokens_ratio=-0.057,
    ...     fits_before=True, fits=True))
    '−0.4 GiB, +6 % step time'
    """
    parts = [_bytes(effect.device_bytes_per_gpu, "")]
    if effect.host_bytes_per_node:
        parts.append(_bytes(effect.host_bytes_per_node, " of RAM a node"))
    if effect.step_ratio is not None and effect.tokens_ratio is not None:
        parts.append(_percent(effect.step_ratio, "step time"))
        if abs((1 + effect.step_ratio) * (1 + effect.tokens_ratio) - 1) > 5e-3:  # the tokens of a step changed
            parts.append(_percent(effect.tokens_ratio, "tokens/s"))
    if effect.fits != effect.fits_before:
        parts.append("fits now" if effect.fits else "no longer fits")
    return ", ".join(parts)


def _bytes(count: int, what: str) -> str:
    size = f"{abs(count) / GIB:.1f} GiB" if abs(count) >= GIB / 20 or not count else format_bytes(abs(count))
    return f"{_sign(count)}{size}{what}"


def _percent(ratio: float, what: str) -> str:
    if ratio >= 1:
        return f"{what} × {1 + ratio:.1f}"
    rounded = round(100 * ratio) if abs(ratio) >= 0.095 else round(100 * ratio, 1)
    return f"{_sign(rounded)}{abs(rounded):g} % {what}"


def _sign(number: float) -> str:
    return "+" if number > 0 else "−" if number < 0 else "±"


def cost_text(cost: Cost | None) -> str:
    """Returns the bytes of a number in brackets, or nothing."""
    return f" ({format_bytes(cost.count_bytes)} {cost.where})" if cost else ""
