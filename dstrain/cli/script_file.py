"""Writes a job script beside its job, or prints it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.config.edits.lock import backups, differing
from dstrain.errors import Conflict
from dstrain.launch.scripts.script_context import ScriptContext
from dstrain.paths import write_atomic, write_together
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script to write."""

    kind: str
    """The scheduler or tool that runs it."""
    ending: str
    """The suffix of its file name."""
    submit: str
    """The command that starts it; `{}` is the file."""
    text: str
    is_program: bool = True
    """Whether the file is executable."""
    notes: tuple[str, ...] = ()
    """Lines to print about it."""


def finish(script: Script, context: ScriptContext, typed: dict[str, Any]) -> bool:
    """Writes or prints a script, and prints the next command; returns whether it was written."""
    job: Path = typed["job"]
    out: Path = typed["out"] or job.with_name(f"{job.stem}.{script.ending}")
    submit = script.submit.format(shlex.quote(str(out)))
    if not typed["dry_run"]:
        _write(out, script, force=typed["force"])
    if typed["as_json"]:
        document = {"schema": 1, "kind": script.kind, "path": str(out), "submit": submit, "text": script.text}
        answer_json(
            {**document, "nodes": context.nodes, "gpus_per_node": context.gpus, "secrets": list(context.secrets)}
        )
    elif typed["dry_run"]:
        answer(script.text)
    say_lines(script.notes)
    if typed["dry_run"]:
        return False
    say(f"wrote {out}: {counted(context.nodes, 'node')} of {counted(context.gpus, 'GPU')}")
    say(f"next: read it, then {submit}")
    return True


def _write(out: Path, script: Script, *, force: bool) -> None:
    """Writes the file. Raises Conflict if a different one exists, which may have been edited."""
    mode = 0o755 if script.is_program else 0o644
    try:
        present = out.read_text(encoding="utf-8", errors="surrogateescape") if out.exists() else script.text
    except OSError as error:
        raise Conflict(f"{out}: {error.strerror}; nothing was written", hint="Name another file with --out.") from None
    if present != script.text:
        if not force:
            raise differing([out], otherwise="--dry-run prints the new one")
        write_together({}, backups=backups({out: present}))
    write_atomic(out, script.text, mode=mode)
