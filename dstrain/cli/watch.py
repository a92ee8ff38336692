"""`dstrain status --watch`: follows a run that trains, over its run directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.live import Live
from rich.text import Text

from dstrain.cli.console import PlainConsole, answer, width
from dstrain.findings import printable
from dstrain.monitor.comparison import Quantity, figure
from dstrain.monitor.outcomes import best_model
from dstrain.monitor.run_record import read
from dstrain.monitor.windows import number, series
from dstrain.paths import shown
from dstrain.report.report import Report, is_over, report, seconds_left
from dstrain.report.text import checks_text, edit_text, first_text, restart_text, verdict
from dstrain.rundir import RunDir
from dstrain.units import format_bytes, format_seconds
from dstrain.wrapping import wrapped

_BLOCKS = "▁▂▃▄▅▆▇█"
_CELLS = 36
"""Cells of a bar and of a curve."""
_MOST_RANKS = 8
"""Ranks with a bar of their own."""
_MOST_MARKS = 3
_LABEL = 12
"""Columns of a label."""
_PLOTTED = 4 * _CELLS
"""Windows of a curve, the newest."""


def frame(report: Report, columns: int) -> Text:
    """Returns the view of a run, wrapped at the columns of a terminal."""
    head = wrapped(f"{shown(str(report.recorded.run_dir.path))}: {_verdict(report)}", columns)
    view = Text(head, style="bold")
    for label, text, style in _rows(report):
        view.append("\n" + wrapped(f"{label:<{_LABEL}}{printable(text)}", columns), style=f"not bold {style}")
    return view


def _verdict(report: Report) -> str:
    left = seconds_left(report)
    return verdict(report) + (f", {format_seconds(left)} left" if left else "")


def _rows(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yields label, text and style of each line."""
    recorded = report.recorded
    if recorded.cause:
        yield "cause", recorded.cause, "red"
    if report.total_steps:
        share = min(1.0, report.step / report.total_steps)
        yield "", f"{_bar(share)} {100 * share:.0f} %", "green"
    if recorded.state is not None and recorded.state.start and not recorded.windows:
        yield "start", recorded.state.start, ""
    for number_of, text in enumerate(checks_text(report)):
        yield "" if number_of else "checks", text, "yellow" if number_of else ""
    if first := first_text(report):
        is_told = report.first is not None and report.first.cause is not None
        yield "first steps", first, "yellow" if is_told else ""
    if report.losses:
        text = f"{sparkline([value for _, value in report.losses[-_PLOTTED:]])} {report.losses[-1][1]:.4f}"
        yield "loss", text, ""
    if report.evaluations:
        step, value = report.evaluations[-1]
        yield "evaluation", f"{value:.4f} at step {step}", ""
    if (best := best_model(recorded.summary)) is not None:
        yield "best model", best.text, ""
    if recorded.windows:
        rates = [value for _, value in series(recorded.windows[-_PLOTTED:], "tokens_per_s")]
        yield "speed", sparkline(rates), ""
        yield "", speed_text(report, recorded.windows[-1]), ""
    yield from (("memory" if not at else "", text, style) for at, (text, style) in enumerate(_memory(report)))
    if not report.marks:
        yield "health", "no rule was broken", ""
    for mark in report.marks[:_MOST_MARKS]:
        yield "health", f"{mark.rule}: {mark.message}", "red" if mark.severity == "critical" else "yellow"
    for restart in report.restarts[-1:]:
        yield "restart", restart_text(restart), "yellow"
    if report.checkpoints:
        yield "checkpoint", f"step {report.checkpoints[-1]}", ""
    if recorded.edits:
        more = f", and {len(recorded.edits) - 1} more" if len(recorded.edits) > 1 else ""
        yield "edited", edit_text(recorded.edits[0]) + more, ""


def _memory(report: Report) -> Iterator[tuple[str, str]]:
    """Yields a bar for each of the fullest ranks, against the memory of the GPU; of a CPU the fullest rank's RAM."""
    recorded, peaks = report.recorded, report.recorded.peaks
    planned = next((one.planned for one in report.comparisons if one.quantity is Quantity.PEAK), None)
    capacity = recorded.cluster.gpu.memory_bytes if recorded.cluster is not None else None
    for rank, peak in sorted(enumerate(peaks), key=lambda pair: -pair[1])[:_MOST_RANKS]:
        plan = f", {format_bytes(planned)} planned" if planned is not None else ""
        scale = capacity or max(peaks) or 1
        yield f"{_bar(min(1.0, peak / scale))} rank {rank} {format_bytes(peak)}{plan}", ""
    if len(peaks) > _MOST_RANKS:
        yield f"{len(peaks) - _MOST_RANKS} ranks with less are left out", ""
    host = number(recorded.windows[-1].get("host_bytes_max")) if recorded.windows and not peaks else None
    if host is not None:
        yield f"{format_bytes(host)} of RAM in the fullest rank", ""


def speed_text(report: Report, window: Mapping[str, Any]) -> str:
    """Returns the speed of a window, against the plan where there is one."""
    parts = []
    planned = {one.quantity: one.planned for one in report.comparisons}
    rate, each = number(window.get("tokens_per_s")), number(window.get("tokens_per_s_per_gpu"))
    if rate is not None:
        plan = planned.get(Quantity.TOKENS)
        off = f" ({100 * (each / plan - 1):+.0f} % of the plan)" if plan and each is not None else ""
        parts.append(f"{rate:,.0f} tokens/s{off}")
    step_s, mfu = number(window.get("step_s")), number(window.get("mfu"))
    parts += [f"{format_seconds(step_s)} a step"] if step_s is not None else []
    parts += [f"MFU {figure(Quantity.MFU, mfu)}"] if mfu is not None else []
    wait = number(window.get("data_wait_share"))
    parts += [f"{100 * wait:.0f} % waiting for data"] if wait is not None and wait >= 0.01 else []
    share = number(window.get("comm_share"))
    if share is not None and share >= 0.01:
        plan = planned.get(Quantity.COMM)
        off = f" ({100 * plan / step_s:.0f} % planned)" if plan is not None and step_s else ""
        parts.append(f"{100 * share:.0f} % in collectives{off}")
    return ", ".join(parts)


def step_line(report: Report, line: Mapping[str, Any]) -> str:
    """Returns a logged window, or an evaluation, as one line."""
    total = f"/{report.total_steps:,}" if report.total_steps else ""
    evaluation, loss = number(line.get("eval_loss")), number(line.get("loss"))
    if "eval_loss" in line:
        return f"step {line['step']:,}{total}, evaluation loss {_number(evaluation)}"
    left = seconds_left(report) if line is report.recorded.windows[-1] else None
    parts = [f"step {line['step']:,}{total}", f"loss {_number(loss)}", speed_text(report, line)]
    peak = number(line.get("peak_bytes_per_gpu"))
    parts += [f"peak {format_bytes(peak)}"] if peak is not None else []
    parts += [f"{format_seconds(left)} left"] if left else []
    return ", ".join(filter(None, parts))


def news(report: Report, since: float) -> Iterator[tuple[float, str]]:
    """Yields the records after a time, in seconds since the epoch, each with its own, in the order of time."""
    recorded = report.recorded
    found = [(line, step_line(report, line)) for line in (*recorded.windows, *recorded.evaluations)]
    found += [(line, f"WARNING: {printable(line['message'])}") for line in recorded.findings]
    found += [
        (line, f"restart: {restart_text(one)}") for line, one in zip(recorded.restarts, report.restarts, strict=False)
    ]
    timed = [(number(line.get("time_s")) or 0.0, text) for line, text in found]
    yield from sorted(pair for pair in (*timed, *findings(report)) if pair[0] > since)


def findings(report: Report) -> Iterator[tuple[float, str]]:
    """Yields the findings of the checks and the first steps, with their time, in seconds since the epoch."""
    recorded, first = report.recorded, first_text(report)
    if recorded.state is not None:
        yield from ((recorded.state.began, f"checks: {printable(text)}") for text in checks_text(report))
    if recorded.verdict is not None and first:
        yield number(recorded.verdict.get("time_s")) or 0.0, f"first steps: {printable(first)}"


def sparkline(values: Sequence[float]) -> str:
    """Returns values as blocks of eight heights, the newest at the end; more than fit are averaged.

    >>> sparkline([1, 2, 3, 8]), sparkline([5, 5])
    ('▁▂▃█', '▄▄')
    """
    size = -(-len(values) // _CELLS) or 1
    means = [sum(part) / len(part) for at in range(0, len(values), size) if (part := values[at : at + size])]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return _BLOCKS[3] * len(means)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in means)


def _bar(share: float) -> str:
    filled = round(_CELLS * share)
    return "█" * filled + "░" * (_CELLS - filled)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


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
    """Prints the findings at a run's start, its newest line, and then new ones; returns the last report."""
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
