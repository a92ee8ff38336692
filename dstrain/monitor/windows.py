"""Reads the values of logged windows and measured states (pure); anything that is no number is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
VERDICT = "verdict"
"""The `event` of the line of `metrics.jsonl` that compares the first steps with the plan."""
_STATES = ("params", "grads", "optimizer", "host")


def number(value: object) -> float | None:
    """Returns a number of a JSON file; None for anything else.

    >>> number(3), number(None), number(True)
    (3.0, None, None)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def series(windows: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """Returns step and value of a metric in each window that has it.

    >>> series([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], "loss")
    [(1, 2.0)]
    """
    values = ((window["step"], number(window.get(name))) for window in windows)
    return [(step, value) for step, value in values if value is not None]


def peaks_by_rank(windows: Sequence[Line]) -> tuple[float, ...]:
    """Returns the largest peak of each rank over all windows; empty if it was not measured, as on a CPU."""
    listed = [peaks for window in windows if isinstance(peaks := window.get("peak_bytes_by_rank"), list)]
    known = [numbers for peaks in listed if None not in (numbers := [number(peak) for peak in peaks])]
    same = [numbers for numbers in known if len(numbers) == len(known[-1])]
    return tuple(max(float(peak or 0) for peak in of_rank) for of_rank in zip(*same, strict=True))


def states_by_rank(data: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
    """Returns the measured bytes of model states of each rank, from `states.json`; empty unless all are known."""
    ranks = data.get("ranks")
    if not isinstance(ranks, list):
        return ()
    whole = [rank for rank in ranks if isinstance(rank, dict) and all(isinstance(rank.get(k), int) for k in _STATES)]
    return tuple(whole) if len(whole) == len(ranks) else ()
