"""Shows the progress of a run: rank 0's output and, on a terminal, a progress bar."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dstrain.cli.console import say, talk
from dstrain.heartbeat import COUNTED, Phase
from dstrain.units import format_seconds

LINE_S = 5.0
"""Seconds between two lines about a phase if stderr is not a terminal."""


class Screen:
    """Takes text in pieces; a terminal that has gone away does not end a training."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._phase: Phase | None = None
        self._line_at = 0.0
        self._begun = (0.0, 0)
        self._task: TaskID | None = None
        self._partial = ""

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    def say(self, text: str) -> None:
        """Prints a message of dstrain."""
        with suppress(OSError):
            say(text)

    def pass_on(self, text: str) -> None:
        """Prints the output of rank 0: whole lines above the progress bar, or unchanged without one."""
        with suppress(OSError):
            if self._bar is None:
                sys.stderr.write(text)
                sys.stderr.flush()
                return
            *lines, self._partial = (self._partial + text).split("\n")
            for line in lines:
                self._bar.console.print(line.rpartition("\r")[2], markup=False, highlight=False, soft_wrap=True)

    def progress(self, phase: Phase, done: int | None, total: int) -> None:
        """Shows how far a phase is: a bar on a terminal; elsewhere a line every few seconds, of all but steps."""
        with suppress(OSError):
            if not sys.stderr.isatty():  # it may have been one before the login dropped
                self._end_bar()
                self._say_line(phase, done, total)
            elif done is not None and (total or phase in COUNTED):
                if self._bar is None or phase is not self._phase:
                    self._end_bar()
                    self._begin_bar(phase, done)
                assert self._bar is not None
                assert self._task is not None
                rate = self._rate(time.monotonic(), done)
                self._bar.update(self._task, completed=done, total=total or None, rate=f"{rate:,.0f}/s" if rate else "")

    def _rate(self, now: float, done: int) -> float:
        """Returns how many a second were done since the phase began, or since it counts anew; 0 if unknown."""
        if done < self._begun[1]:
            self._begun = (now, done)
        seconds = now - self._begun[0]
        return (done - self._begun[1]) / seconds if seconds > 0 else 0.0

    def _say_line(self, phase: Phase, done: int | None, total: int) -> None:
        now = time.monotonic()
        if phase is not self._phase:
            self._phase, self._line_at, self._begun = phase, now + LINE_S, (now, done or 0)
        elif phase in COUNTED and now >= self._line_at:
            self._line_at = now + LINE_S
            say(phase if not done else f"{phase}: {self._counted(phase, done, total, self._rate(now, done))}")

    @staticmethod
    def _counted(phase: Phase, done: int, total: int, rate: float) -> str:
        """Returns how far a phase is, how fast, and the time left.

        >>> Screen._counted(Phase.TOKENIZING, 2000, 5000, 400.0)
        '2,000 of 5,000 samples, 400/s, 7.50 s left'
        """
        text = f"{done:,}{f' of {total:,}' if total else ''} {COUNTED[phase]}"
        text += f", {rate:,.0f}/s" if rate else ""
        return text + (f", {format_seconds((total - done) / rate)} left" if rate and total >= done else "")

    def _begin_bar(self, phase: Phase, done: int) -> None:
        self._phase, self._begun = phase, (time.monotonic(), done)
        name = f"{phase}, {COUNTED[phase]}" if phase in COUNTED else "steps"
        rate = (TextColumn("{task.fields[rate]}"),) if phase in COUNTED else ()
        columns = (BarColumn(), MofNCompleteColumn(), *rate, TimeElapsedColumn(), TextColumn("left"))
        remaining = TimeRemainingColumn()
        self._bar = Progress(TextColumn(name), *columns, remaining, console=talk, transient=True, refresh_per_second=2)
        self._task = self._bar.add_task(name, rate="")
        self._bar.start()

    def _end_bar(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()
            if self._partial:
                self.pass_on(f"{self._partial}\n")
                self._partial = ""
