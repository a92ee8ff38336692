"""The protocol of a sink, which stores the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dstrain.choices import SwanLabMode

if TYPE_CHECKING:
    from dstrain.monitor.end_report import EndReport  # loads the planner, which rank 0 alone needs

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

    def report(self, report: EndReport) -> None:
        """Adds the report of the run, as text and as a table, if the sink can show them."""

    def finish(self, end: str, error: str | None) -> None:
        """Flushes and closes; `end` is a value of `End`."""


class Opener(Protocol):
    """Opens a sink; raises DstrainError if the user must act, and anything else if it merely failed."""

    def __call__(self, setup: Any, say: Say) -> Sink | None:
        """Returns the sink, or None after printing the reason."""
