"""Writes a job script beside its job, or prints it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.config.edits.lock import beside_unused
from dstrain.errors import Conflict
from dstrain.launch.scripts.script_context import ScriptContext
from dstrain.paths import write_atomic, write_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that is about to be written."""

    kind: str
    """What it is for."""
    ending: str
    """How its file name ends."""
    submit: str
    """What to type to start it; `{}` is the file."""
    text: str
    """The script."""
    is_program: bool = True
    """Whether the file may be executed."""
    notes: tuple[str, ...] = ()
    """What to say about it."""


def finish(script: Script, asked: ScriptContext, typed: dict[str, Any]) -> bool:
    """Writes or prints a script, and says what to type next; returns whether it was written."""
    job: Path = typed["job"]
    out: Path = typed["out"] or job.with_name(f"{job.stem}.{script.ending}")
    submit = script.submit.format(shlex.quote(str(out)))
    if not typed["dry_run"]:
        _write(out, script, force=typed["force"])
    if typed["as_json"]:
        what = {"schema": 1, "kind": script.kind, "path": str(out), "submit": submit, "text": script.text}
        answer_json({**what, "nodes": asked.nodes, "gpus_per_node": asked.gpus, "secrets": list(asked.secrets)})
    elif typed["dry_run"]:
        answer(script.text)
    say_lines(script.notes)
    if typed["dry_run"]:
        return False
    count = f"{asked.nodes} node{'s' if asked.nodes > 1 else ''} of {asked.gpus} GPU{'s' if asked.gpus > 1 else ''}"
    say(f"wrote {out}: {count}")
    say(f"next: read it, then {submit}")
    return True


def _write(out: Path, script: Script, *, force: bool) -> None:
    """Writes the file; raises Conflict where another one stands there, which somebody may have edited."""
    mode = 0o755 if script.is_program else 0o644
    try:
        present = out.read_text(encoding="utf-8", errors="surrogateescape") if out.exists() else script.text
    except OSError as error:
        raise Conflict(f"{out}: {error.strerror}; nothing was written", hint="Name another file with --out.") from None
    if present != script.text:
        if not force:
            raise Conflict(
                f"{out} exists already and differs; nothing was written",
                hint="--force writes it and keeps yours as .bak; --dry-run prints the new one.",
            )
        kept = beside_unused(out.parent, {f"{out.name}.bak": present})
        write_together({}, backups={out.parent / name: text for name, text in kept.items()})
    write_atomic(out, script.text, mode=mode)
