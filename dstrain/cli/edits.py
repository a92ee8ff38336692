"""`dstrain explain --edits`: lists hand edits and what each one does to memory and speed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dstrain.cli.console import answer, answer_json, say, say_unread_links
from dstrain.cli.output.edits import effect_text, shown
from dstrain.config.document import dotted
from dstrain.config.edits.lock import LOCK, read_lock, standing
from dstrain.config.edits.regenerate import document as manual_document
from dstrain.config.edits.regenerate import manual_edits
from dstrain.errors import InvalidConfig
from dstrain.launch.prepare.edit_effects import Effects, Measured, effects
from dstrain.units import counted


def explain_edits(folder: Path, *, as_json: bool) -> None:
    """Prints each edit with its effect on memory and speed, alone and all together, and what lint finds at it."""
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
        lines += [f"  {text}{_edit_text(measured, result)}" for measured, text in rows if measured.edit.file == name]
    if result.together is not None:
        others = [dotted(measured.edit.pointer) for measured in result.edits if measured.effect is None]
        without = f", without {', '.join(others)}" if others else ""
        lines.append(f"all together{without}: {effect_text(result.together)}")
    return lines


def _edit_text(measured: Measured, result: Effects) -> str:
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
