"""`dstrain status --watch`: follows a run that trains, over its run directory."""

from __future__ import annotations

import sys
import time

from rich.live import Live

from dstrain.cli.console import PlainConsole, answer, width
from dstrain.cli.output.watch import findings, frame, news
from dstrain.monitor.best_model import best_model
from dstrain.paths import shown
from dstrain.report.progress import is_over
from dstrain.report.recorded import read
from dstrain.report.report import Report, report
from dstrain.report.text import verdict
from dstrain.rundir import RunDir

_MOST_LOAD = 0.1
"""Share of the time that is spent on reading: the files of a long run take longer than the interval allows."""


def follow(place: RunDir, every: float) -> bool:
    """Follows a run until it ends, with a look every so many seconds; returns whether it ended well.

    On a terminal the view is drawn again; elsewhere each logged step, evaluation, warning and restart is one line.
    """
    console = PlainConsole(file=sys.stdout, highlight=False, emoji=False)
    last = _draw(place, every, console) if console.is_terminal else _print(place, every)
    return last.is_good


def _draw(place: RunDir, every: float, console: PlainConsole) -> Report:
    """Draws the view again and again, and returns the last report."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            one, pause_s = _look(place, every)
            live.update(frame(one, width(console)), refresh=True)
            if is_over(one, now=time.time()):
                return one
            time.sleep(pause_s)


def _print(place: RunDir, every: float) -> Report:
    """Prints what a run found at its start, its newest line, and then what is new; returns the last report."""
    since: float | None = None
    while True:
        one, pause_s = _look(place, every)
        if since is None:
            answer(f"{shown(str(place.path))}: {verdict(one)}")
            since = max((at for at, _ in list(news(one, 0.0))[:-1]), default=0.0)
            for at, line in findings(one):
                if at <= since:
                    answer(line)
        for at, line in news(one, since):
            answer(line)
            since = at
        sys.stdout.flush()
        if is_over(one, now=time.time()):
            if (best := best_model(one.recorded.summary)) is not None:
                answer(best.text)
            answer(f"{shown(str(place.path))}: {verdict(one)}")
            return one
        time.sleep(pause_s)


def _look(place: RunDir, every: float) -> tuple[Report, float]:
    """Returns the report, and the seconds until the next one."""
    began = time.monotonic()
    one = report(read(place), now=time.time())
    return one, max(every, (time.monotonic() - began) / _MOST_LOAD)
