"""`dstrain diff`: lists hand edits and what each does to memory and speed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dstrain.cli.console import answer, answer_json, say
from dstrain.cli.output.conflicts import shown
from dstrain.cli.output.edit_effects import Effects, Measured, effects
from dstrain.cli.output.effects import effect_text
from dstrain.config.document import dotted
from dstrain.config.edits.lock import LOCK, read_lock, standing
from dstrain.config.edits.manual_edits import document as manual_document
from dstrain.config.edits.manual_edits import manual_edits
from dstrain.errors import InvalidConfig


@click.command("diff")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
@click.option("--json", "as_json", is_flag=True, help="Print the edits as JSON.")
def command(folder: Path, as_json: bool) -> None:
    """List your edits since the files of a folder were generated, with their effect on memory and speed.

    Compares each edit alone, then all edits together, with the generated files, on the model and the cluster they were
    generated for. Writes nothing.

    \b
    Example:
      dstrain diff
      dstrain diff runs/qwen3 --json
    """
    lock = read_lock(folder)
    if lock is None:
        raise InvalidConfig(
            f"{folder / LOCK}: no such file, so edits are unknown",
            hint="dstrain gen-config writes it; for your own files, dstrain adopt does.",
        )
    edits = manual_edits(folder, lock)
    gone = [name for name in lock.base if name not in standing(folder, lock.base)]
    found = effects(folder, lock, edits)
    if as_json:
        answer_json(_document(folder, found, gone))
        return
    for name in gone:
        answer(f"{folder / name}: removed; gen-config writes it again")
    if not edits and not gone:
        answer("no edits since the files were generated")
        return
    for line in _lines(folder, found):
        answer(line)
    if found.reason is not None:
        say(f"no estimate: {found.reason}")


def _lines(folder: Path, found: Effects) -> list[str]:
    """Returns the edits by file with their effects, and the effect of all edits together."""
    rows = [
        (each, f"{dotted(each.edit.pointer)} {shown(each.edit.base)} → {shown(each.edit.yours)}")
        for each in found.edits
    ]
    lines: list[str] = []
    for name in dict.fromkeys(each.edit.file for each, _ in rows):
        lines.append(str(folder / name))
        lines += [f"  {text}{_told(each, found)}" for each, text in rows if each.edit.file == name]
    if found.together is not None:
        others = [dotted(each.edit.pointer) for each in found.edits if each.effect is None]
        without = f", without {', '.join(others)}" if others else ""
        lines.append(f"all together{without}: {effect_text(found.together)}")
    return lines


def _told(each: Measured, found: Effects) -> str:
    if each.effect is not None:
        return f": {effect_text(each.effect)}{f' ({each.note})' if each.note else ''}"
    return "" if each.note is None or found.reason is not None else f": {each.note}"


def _document(folder: Path, found: Effects, gone: list[str]) -> dict[str, Any]:
    listed = [
        {**row, "effect": asdict(each.effect) if each.effect else None, "note": each.note}
        for row, each in zip(manual_document([each.edit for each in found.edits]), found.edits, strict=True)
    ]
    return {
        "schema": 1,
        "folder": str(folder),
        "edits": listed,
        "removed_files": gone,
        "together": asdict(found.together) if found.together else None,
        "reason": found.reason,
    }
