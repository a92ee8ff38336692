"""Runs many probes at once, each with a time limit, so that none blocks the others."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of one look."""

    value: Any = None
    """What was found; None where nothing was."""
    problem: str | None = None
    """Why nothing was found."""


def all_at_once(looks: Mapping[str, Callable[[], Any]], limit_s: float) -> dict[str, Seen]:
    """Returns what came of every look within `limit_s`; one that takes longer is left behind.

    Each runs in a thread that nothing waits for: the resolver of names and a driver that hangs cannot be interrupted.
    """
    found: dict[str, Seen] = {}
    threads = [
        threading.Thread(target=_look, args=(name, look, found), name=f"look {name}", daemon=True)
        for name, look in looks.items()
    ]
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = Seen(problem=f"no answer within {limit_s:g} s")
    return {name: found.get(name, late) for name in looks}


def _look(name: str, look: Callable[[], Any], found: dict[str, Seen]) -> None:
    try:
        found[name] = Seen(value=look())
    except Exception as error:  # whatever goes wrong while looking is a finding, not the end of the others
        found[name] = Seen(problem=f"{type(error).__name__}: {error}".rstrip(": "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command said."""

    out: str = ""
    """Its stdout."""
    err: str = ""
    """Its stderr."""
    code: int | None = None
    """Its exit code; None where it did not start, or did not end in time."""
    is_late: bool = False
    """Whether it did not end in time."""

    @property
    def last_line(self) -> str:
        """The last line of what it said, stderr after stdout; nothing where it said nothing."""
        lines = [line.strip() for line in (self.out + "\n" + self.err).splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Said:
    """Returns what a command said; it and its children are killed after `limit_s`. Raises FileNotFoundError.

    A process that waits in a driver outlives SIGKILL: it is not waited for.
    """
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment) | {"LC_ALL": "C"},
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.2)
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        return Said(is_late=True)
    return Said(out=out.decode(errors="replace"), err=err.decode(errors="replace"), code=child.returncode)
