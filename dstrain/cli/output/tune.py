"""Prints what `dstrain tune` will run, and what it measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.launch.run.trial import Ending, Trial
from dstrain.monitor.windows import is_slower
from dstrain.plan.estimate_records import Estimate
from dstrain.records import to_data
from dstrain.units import counted, format_bytes, format_seconds

NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration with what came of it."""

    title: str
    """Its choices in words."""
    estimate: Estimate
    num_gpus: int
    trial: Trial | None
    """None if it was not tried."""
    is_present: bool = False
    """Whether it is the one in the job's files."""
    is_earlier: bool = False
    """Whether it was measured by an earlier `dstrain tune`."""
    base: Row | None = None
    """The same configuration without torch.compile, if that is what it is compared with."""
    planned_steps: int | None = None
    """Optimizer steps of the run that is tuned for; None if that is unknown, or nothing is compiled."""

    @property
    def predicted(self) -> float | None:
        """Tokens per second of all GPUs by the plan, padding included."""
        speed = self.estimate.speed
        return None if speed is None else speed.tokens_per_s_per_gpu * self.num_gpus

    @property
    def tokens_per_s(self) -> float | None:
        """The same as measured, the median."""
        measured = self.trial.measured if self.trial is not None else None
        return None if measured is None else measured.tokens_per_s

    @property
    def peak_bytes(self) -> int | None:
        """Peak of allocated GPU memory, of the rank with most."""
        measured = self.trial.measured if self.trial is not None else None
        peaks = [rank.peak_bytes for rank in measured.ranks if rank.peak_bytes] if measured is not None else []
        return max(peaks, default=None)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, the median; None if too few were measured."""
        return self.trial.step_s if self.trial is not None else None

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile compiles its layers."""
        return self.estimate.configuration.kernels.torch_compile

    @property
    def compile_s(self) -> float | None:
        """How much longer it took to start than its base: what compiling costs; None if that is unknown."""
        starts = [row.trial.start_s if row is not None and row.trial is not None else None for row in (self, self.base)]
        own, other = starts
        return max(0.0, own - other) if own is not None and other is not None else None

    @property
    def pays_back_after(self) -> int | None:
        """Steps that save the time of compiling; None if nothing is compiled, or it is no faster beyond the noise."""
        base_s = self.base.step_s if self.base is not None and _is_slower(self.base, self) else None
        if base_s is None or self.step_s is None or self.compile_s is None:
            return None
        return math.ceil(self.compile_s / (base_s - self.step_s))

    @property
    def pays_back(self) -> bool:
        """Whether its steps save more than it costs to compile within the planned run, or nothing is compiled."""
        steps, planned = self.pays_back_after, self.planned_steps
        return self.base is None or (steps is not None and planned is not None and steps < planned)


def winner(rows: Sequence[Row]) -> Row | None:
    """Returns the fastest configuration, the present one if it is as fast within the noise, or None without times.

    One that compiles is left out unless that pays back within the planned run.
    """
    timed = [row for row in rows if row.step_s is not None and row.pays_back]
    if not timed:
        return None
    best = min(timed, key=lambda row: row.step_s or 0.0)
    present = next((row for row in timed if row.is_present), None)
    return present if present is not None and not _is_slower(present, best) else best


def _is_slower(row: Row, best: Row) -> bool:
    one, other = (each.trial.measured if each.trial is not None else None for each in (row, best))
    return one is not None and other is not None and is_slower(one, other)


def verdict(row: Row, best: Row | None, rows: Sequence[Row] = ()) -> str:
    """Returns what came of a configuration, in words."""
    if row.trial is None:
        return "not tried"
    if row.trial.ending is Ending.OUT_OF_MEMORY:
        return "out of memory"
    if row.trial.ending is Ending.FAILED:
        return "failed"
    if row.step_s is None or best is None or best.step_s is None:
        return "no time left to measure it"
    if row is best:
        is_fastest = all(row.step_s <= other.step_s for other in rows if other.step_s is not None and other.pays_back)
        return f"fastest{_compiling(row)}" if is_fastest else "stays: as fast within the noise"
    if row.pays_back_after is not None and not row.pays_back:
        return f"{100 * (row.step_s / best.step_s - 1):+.1f} % time{_compiling(row)}"
    words = f"{100 * (row.step_s / best.step_s - 1):+.1f} % time"
    if not _is_slower(row, best):
        return f"{words}, within the noise"
    measured = row.trial.measured
    is_whole = row.trial.ending is Ending.MEASURED or measured is None
    return words if is_whole or measured is None else f"{words}, by {counted(measured.steps, 'step')}"


def _compiling(row: Row) -> str:
    """Returns what compiling costs, and after how many steps of the run that is paid back; empty if nothing is."""
    if row.compile_s is None or row.pays_back_after is None:
        return ""
    planned = "a run of unknown length" if row.planned_steps is None else f"{row.planned_steps:,}"
    return (
        f"; compiling takes {format_seconds(row.compile_s)}, paid back after {row.pays_back_after:,} steps of {planned}"
    )


def told(row: Row) -> str:
    """Returns what came of a configuration that has just run."""
    assert row.trial is not None
    took = format_seconds(row.trial.seconds)
    if row.step_s is None:
        return f"{verdict(row, None)} ({took}){f': {row.trial.problem}' if row.trial.problem else ''}"
    early = ": slower, ended early" if row.trial.ending is Ending.SLOWER else ""
    compiling = "" if row.compile_s is None else f", {format_seconds(row.compile_s)} of it compiling"
    warm_up = row.trial.measured.warm_up_steps if row.trial.measured is not None else 0
    slow = f"; {warm_up} steps warmed up" if warm_up > 1 else ""
    return f"{format_seconds(row.step_s)} a step, {_rate(row.tokens_per_s)} tokens/s ({took}{compiling}{slow}){early}"


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the table for people."""
    best = winner(rows)
    cells = [("", "predicted", "tokens/s", "a step", "peak", "")]
    cells += [
        (
            f"{'* ' if row.is_present else '  '}{row.title}",
            _rate(row.predicted),
            _rate(row.tokens_per_s if row.step_s is not None else None),
            NONE if row.step_s is None else format_seconds(row.step_s),
            NONE if row.peak_bytes is None else format_bytes(row.peak_bytes),
            f"{verdict(row, best, rows)}{' (measured before)' if row.is_earlier else ''}",
        )
        for row in rows
    ]
    lines = list(_aligned(cells))
    if any(row.is_present for row in rows):
        lines.append("* the present configuration")
    return lines


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
        yield "  ".join((f"{row[0]:<{widths[0]}}", *numbers, row[-1])).rstrip()


def dry_lines(rows: Sequence[Row], steps: int) -> Iterator[str]:
    """Yields what would run, and how long by the plan."""
    for row in rows:
        speed, sign = row.estimate.speed, "* " if row.is_present else "  "
        memory = format_bytes(row.estimate.memory.device_bytes_per_gpu)
        time = NONE if speed is None else format_seconds((steps + 1) * speed.step_s)
        known = "  measured before" if row.is_earlier else ""
        refused = f"  {verdict(row, None)}" if row.trial is not None and row.trial.ending is Ending.FAILED else ""
        yield f"{sign}{row.title}: {time}, {memory} per GPU{known}{refused}"
    to_run = [row for row in rows if row.trial is None]
    times = [row.estimate.speed.step_s * (steps + 1) for row in to_run if row.estimate.speed is not None]
    if not to_run:
        yield "nothing is left to measure"
    elif len(times) < len(to_run):
        yield f"{len(to_run)} runs; the plan predicts no time here, and starts come on top"
    else:
        yield f"{counted(len(to_run), 'run')}: {format_seconds(sum(times))} of steps by the plan; starts come on top"


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the table as JSON."""
    best = winner(rows)
    return {
        "schema": 1,
        "winner": None if best is None else best.title,
        "candidates": [
            {
                "title": row.title,
                "is_present": row.is_present,
                "configuration": to_data(row.estimate)["configuration"],
                "predicted_tokens_per_s": row.predicted,
                "tokens_per_s": row.tokens_per_s,
                "step_s": row.step_s,
                "peak_bytes": row.peak_bytes,
                "verdict": verdict(row, best, rows),
                "was_measured_before": row.is_earlier,
                "compile_s": row.compile_s,
                "pays_back_after_steps": row.pays_back_after,
                "trial": None if row.trial is None else to_data(row.trial),
            }
            for row in rows
        ],
    }
