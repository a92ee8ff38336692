"""Turns what a run records into notices: its first step, broken health rules, restarts, and how it ended."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError, Interrupted, SavedAndLeft
from dstrain.heartbeat import Phase
from dstrain.job.schema import Job
from dstrain.monitor.notices import Notice, Notifier
from dstrain.monitor.sinks.jsonl import current_steps, read_jsonl
from dstrain.rundir import RunDir
from dstrain.units import counted

_RESTART = "restart"
"""Stands for a rule: restarts are as rare as notices of one rule."""


def described(job: Job, num_ranks: int) -> str:
    """Returns what is trained, in a line."""
    return f"{job.method} training of {Path(job.model).name}, {counted(num_ranks, 'rank')}"


class RunNotices:
    """The notices of one run: `dstrain run` sends them, or rank 0 if the run was started otherwise.

    Whoever sends looks at the run directory about once a second.
    """

    def __init__(self, run_dir: RunDir, what: str, notifier: Notifier) -> None:
        """`what` says what is trained, in a line (`described`)."""
        self._notifier = notifier
        self._run_dir = run_dir
        self._name = f"{run_dir.path.name} on {socket.gethostname()}"
        self._what = what
        self._seen = {path: len(read_jsonl(path)) for path in (run_dir.health, run_dir.restarts)}
        self._has_started = False

    def look(self, phase: Phase, done: int | None) -> None:
        """Sends what is new."""
        if self._notifier.is_silent:
            return
        if phase is Phase.STEP and done and not self._has_started:
            self._has_started = True
            self._send("start", "first step done", self._what)
        for path, seen in self._seen.items():
            records = read_jsonl(path)
            self._seen[path] = len(records)
            for record in records[seen:]:
                is_health = path == self._run_dir.health
                text = record.get("message") if is_health else f"{record.get('cause')}"
                rule = str(record.get("rule")) if is_health else _RESTART
                what = f"health rule {rule}" if is_health else f"starting again from step {record.get('from_step')}"
                self._send("trouble", what, str(text), rule=rule)

    def end(self, error: DstrainError | None) -> None:
        """Sends how the run ended, and waits for the notices that are on their way."""
        if self._notifier.is_silent:
            return
        self.look(Phase.DONE, None)
        last: dict[str, Any] = next(reversed(current_steps(read_jsonl(self._run_dir.metrics))), {})
        words = ", ".join(f"{name} {last[name]:.6g}" for name in ("step", "loss") if last.get(name) is not None)
        if error is None:
            self._send("end", "trained to its end", words)
        elif isinstance(error, Interrupted | SavedAndLeft):
            self._send("end", "ended before its last step", f"{error.problem}\n{words}".strip())
        else:
            self._send("failure", "failed", f"{error.problem}\n{words}".strip())
        self._notifier.close()

    def _send(self, event: str, what: str, text: str, *, rule: str | None = None) -> None:
        self._notifier.send(Notice(event=event, title=f"dstrain: {self._name}: {what}", text=text, rule=rule))
