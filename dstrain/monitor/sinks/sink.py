"""The protocol of a sink, which stores the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from dstrain.choices import SwanLabMode

Say = Callable[[str], None]


class End(StrEnum):
    """How a run ended."""

    SUCCESS = "success"
    CRASHED = "crashed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments of a sink."""

    project: str
    name: str
    """Name of the run."""
    mode: SwanLabMode
    """SwanLab's mode."""
    run_dir: Path
    """The run directory, for the sink's files."""
    config: Mapping[str, Any]
    """Job and configuration, without secrets."""
    description: str = ""
    """Model, data and machines in a few sentences."""
    tags: tuple[str, ...] = ()
    is_resumed: bool
    """Whether the sink continues an earlier part of this run."""


REPORT = "report"
"""Name of the table at the end of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text and figures that a sink shows beside its curves."""

    name: str
    """`report`, `expert_loads` or `samples`."""
    step: int
    """The step that it is about."""
    text: str
    """All of it as Markdown."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as Markdown.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in (columns, *rows)]
    lines.insert(1, ["---"] * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Sink(Protocol):
    """Stores or shows curves."""

    @property
    def place(self) -> str:
        """Where to find the curves, for people."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Entries for `summary.json`, such as the sink's folder."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""

    def show(self, table: Table) -> None:
        """Adds a table, and its text, as far as the sink can show them."""

    def finish(self, end: str, error: str | None) -> None:
        """Flushes and closes; `end` is a value of `End`."""


class Opener(Protocol):
    """Opens a sink; raises DstrainError if the user must act, and anything else if it merely failed."""

    def __call__(self, setup: Any, say: Say) -> Sink | None:
        """Returns the sink, or None after printing the reason."""
