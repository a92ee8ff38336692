"""Reads the verdict of a run's first steps on its plan."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.errors import DstrainError
from dstrain.monitor.comparison import Difference
from dstrain.monitor.windows import Line
from dstrain.records import from_data


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstVerdict:
    """Verdict of the last start's first steps on the plan."""

    step: int
    cause: Difference | None
    """The part that differed by more than the range of the plan."""
    setting: str
    """The line to change; empty if there is none."""
    gain: str
    """Its gain."""
    note: str
    """The note if there is no advice."""


def first_verdict(line: Line | None) -> FirstVerdict | None:
    """Returns the verdict of the first steps; None without one that can be read."""
    if line is None:
        return None
    cause, advice = line.get("cause"), line.get("advice")
    change = advice if isinstance(advice, dict) else {}
    try:
        difference = from_data(Difference, cause, locate=lambda place: "/".join(map(str, place))) if cause else None
    except DstrainError:  # of another dstrain
        return None
    texts = [text if isinstance(text, str) else "" for text in (change.get("setting"), change.get("gain"))]
    note = line.get("note")
    return FirstVerdict(
        step=line["step"],
        cause=difference,
        setting=texts[0],
        gain=texts[1],
        note=note if isinstance(note, str) else "",
    )
