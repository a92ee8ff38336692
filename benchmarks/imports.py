"""Tries `dstrain import` on example files of other tools: what is imported, what is refused and why, what is lost.

Example: python benchmarks/imports.py LLaMA-Factory/examples ms-swift/examples --model qwen3-8b

Reads every .yaml, .yml and .sh file below the folders. With --model each file that is not refused is also planned and
linted for 8 × H100 as the command does it, with this model in place of its own, since most ids can only be looked up on
a hub.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.cli.main import cli
from dstrain.config.imports.read import import_file
from dstrain.config.imports.source import Fate
from dstrain.config.imports.walk import Note
from dstrain.errors import DstrainError

_SUFFIXES = (".yaml", ".yml", ".sh")
_MACHINES = ("--gpus", "8", "--gpu", "h100")
_LOST = (Fate.CHANGED, Fate.MISSING, Fate.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One file, tried."""

    path: Path
    tool: str
    """The tool of the file; empty if it is recognized as none."""
    refused: str | None
    """Why it is refused; None if it is imported."""
    notes: tuple[Note, ...] = ()
    findings: int | None = None
    """Findings of lint; None without a plan."""


def files(folder: Path) -> list[Path]:
    """Returns the files below a folder that may start a training."""
    return sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())


def tried(path: Path, model: str | None) -> Trial:
    """Imports a file, and plans it with a model if one is named; writes nothing."""
    try:
        imported = import_file(path)
    except DstrainError as error:
        return Trial(path=path, tool="", refused=error.text.splitlines()[0])
    tool = imported.source.tool.name
    if imported.stops:
        reason = f"another training: {imported.stops[0].key}"
        return Trial(path=path, tool=tool, refused=reason, notes=imported.notes)
    if model is None:
        return Trial(path=path, tool=tool, refused=None, notes=imported.notes)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            cli.main(["import", str(path), *_MACHINES, "--model", model, "-n", "--json"], standalone_mode=False)
    except DstrainError as error:
        return Trial(path=path, tool=tool, refused=f"planned: {error.text.splitlines()[0]}", notes=imported.notes)
    findings = len(json.loads(printed.getvalue())["findings"])
    return Trial(path=path, tool=tool, refused=None, notes=imported.notes, findings=findings)


def trials(folders: Sequence[Path], model: str | None) -> Iterator[Trial]:
    """Yields every file of the folders, tried from the folder above it, in which its tool is started."""
    for folder in folders:
        with contextlib.chdir(folder.resolve().parent):
            for path in files(Path(folder.name)):
                yield tried(path, model)


def lines(found: Sequence[Trial]) -> Iterator[str]:
    """Yields a table with one row per tool, the reasons of refusals, and the keys that are lost most often."""
    yield "| tool | files | imported | other training | unreadable | keys lost per imported file |"
    yield "|---|---:|---:|---:|---:|---:|"
    for tool in sorted({trial.tool for trial in found}):
        ours = [trial for trial in found if trial.tool == tool]
        done = [trial for trial in ours if trial.refused is None]
        stopped = [trial for trial in ours if (trial.refused or "").startswith("another training")]
        lost = sum(note.fate in _LOST for trial in done for note in trial.notes)
        mean = f"{lost / len(done):.1f}" if done else "-"
        rest = len(ours) - len(done) - len(stopped)
        yield f"| {tool or 'none'} | {len(ours)} | {len(done)} | {len(stopped)} | {rest} | {mean} |"
    yield ""
    yield "refused:"
    reasons = Counter(f"{trial.tool or 'none'}: {trial.refused}" for trial in found if trial.refused is not None)
    yield from (f"  {number:4} {reason[:110]}" for reason, number in reasons.most_common())
    keys = Counter((trial.tool, note.fate.value, note.key) for trial in found if trial.refused is None
                   for note in trial.notes if note.fate in _LOST)  # fmt: skip
    yield "keys without the same counterpart, in imported files:"
    yield from (f"  {number:4} {tool}: {key} ({fate})" for (tool, fate, key), number in keys.most_common(40))
    counts = [trial.findings for trial in found if trial.findings is not None]
    if counts:
        yield f"planned and linted: {len(counts)} files, {sum(map(bool, counts))} with findings"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders with example files")
    parser.add_argument("--model", help="model with which each file is planned, too")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for line in lines(list(trials(options.folders, options.model))):
        print(line)


if __name__ == "__main__":
    main()
