"""Runs child processes in groups of their own, with a time limit or progress reports, and lists their open files."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstrain.units import format_seconds

_TERM_S = 3.0
_KILL_S = 0.2
TELL_EVERY_S = 15.0
"""Seconds between two progress reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Output and exit code of a command."""

    out: str = ""
    err: str = ""
    code: int | None = None
    """None if it was killed at its time limit."""

    @property
    def is_late(self) -> bool:
        """Whether the command exceeded its time limit."""
        return self.code is None

    @property
    def last_line(self) -> str:
        """The last line of its output, stderr after stdout; empty if there is none."""
        lines = [line.strip() for line in f"{self.out}\n{self.err}".splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, *, stdin: str | None = None
) -> Completed:
    """Returns the output of a command. After `limit_s` seconds it is killed with its children.

    Raises FileNotFoundError if the program does not exist.
    """
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        out, err = child.communicate(None if stdin is None else stdin.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(child, kill_s=_KILL_S)
        # a grandchild that left the group may hold the pipes open: reading on would wait for it
        for pipe in (child.stdin, child.stdout, child.stderr):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        return Completed()
    return Completed(out=out.decode(errors="replace"), err=err.decode(errors="replace"), code=child.returncode)


def run_reporting(
    command: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None], what: str
) -> tuple[int, str]:
    """Returns the exit code and the output; reports every few seconds that it is still `what`, such as "building X".

    If interrupted, ends the child with its process group before it raises.
    """
    begin = time.monotonic()
    child = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        while True:
            try:
                output, _ = child.communicate(timeout=TELL_EVERY_S)
            except subprocess.TimeoutExpired:
                tell(f"  still {what} ({format_seconds(time.monotonic() - begin)})")
            else:
                return child.returncode, output or ""
    except BaseException:
        # Ctrl-C reaches the group of this process, and the child has one of its own
        end(child, term_s=_TERM_S, kill_s=_TERM_S)
        raise


def end(
    child: subprocess.Popen[bytes] | subprocess.Popen[str], *, term_s: float = 0.0, kill_s: float | None = None
) -> None:
    """Ends a child that leads its process group: SIGTERM if `term_s` seconds are given, then SIGKILL.

    A process that waits in a driver outlives SIGKILL: `kill_s` limits the wait for it.
    """
    if child.poll() is not None:
        return
    signals: list[tuple[signal.Signals, float | None]] = [(signal.SIGTERM, term_s)] if term_s else []
    for number, seconds in [*signals, (signal.SIGKILL, kill_s)]:
        with suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(child.pid, number)
            child.wait(seconds)


def open_files(processes: Iterable[int] | None = None, proc: Path = Path("/proc")) -> Iterator[Path]:
    """Yields the files that these processes have open, by default all processes that this user may look into.

    Processes that end meanwhile are left out: `Path.glob` raises an error there in Python 3.11 and 3.12.
    """
    folders = proc.iterdir() if processes is None else (proc / str(number) for number in processes)
    for folder in folders:
        descriptors: list[Path] = []
        with suppress(OSError):
            descriptors = list((folder / "fd").iterdir()) if folder.name.isdigit() else []
        for descriptor in descriptors:
            with suppress(OSError):
                yield descriptor.readlink()
