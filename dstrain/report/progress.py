"""How far a run is, and how long it will take."""

from __future__ import annotations

from dstrain.launch.run.state import LIVING
from dstrain.monitor.windows import number
from dstrain.report.recorded import Recorded
from dstrain.report.report import UNKNOWN, Report

_RECENT = 50
"""Windows from which the pace is taken: it follows a slowdown, and counts evaluations and checkpoints in between."""
_SILENT_S = 600.0
"""Seconds without a logged step after which a run that `dstrain run` did not start is taken for ended."""


def seconds_left(report: Report) -> float | None:
    """Returns the time until the last step at the recent pace, evaluations and checkpoints included; None if the run
    has ended, or if it is not known, as before the second logged window."""
    windows = report.recorded.windows[-_RECENT:]
    if report.total_steps is None or len(windows) < 2 or report.stage not in {*(one.value for one in LIVING), UNKNOWN}:
        return None
    first, last = (number(window.get("time_s")) for window in (windows[0], windows[-1]))
    done = int(windows[-1]["step"])
    steps = done - int(windows[0]["step"])
    if first is None or last is None or steps <= 0 or last <= first:
        return None
    return max(0, report.total_steps - done) * (last - first) / steps


def is_over(report: Report, *, now: float) -> bool:
    """Returns whether a run has ended; `now` is in seconds since the epoch. One without a record of its stage has ended
    if it has a summary, or if nothing was logged for ten minutes."""
    if report.stage != UNKNOWN:
        return report.stage not in {stage.value for stage in LIVING}
    return now - (_last_word(report.recorded) or 0.0) > _SILENT_S


def _last_word(recorded: Recorded) -> float | None:
    """Returns when the last step or evaluation was logged, in seconds since the epoch."""
    times = [number(line.get("time_s")) for line in (*recorded.windows[-1:], *recorded.evaluations[-1:])]
    return max((at for at in times if at is not None), default=None)
