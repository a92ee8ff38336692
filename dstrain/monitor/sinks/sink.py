"""The protocol of a sink, which keeps the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """What a sink is opened with."""

    project: str
    """Project name."""
    name: str
    """Name of the run."""
    mode: SwanLabMode
    """SwanLab's mode."""
    run_dir: Path
    """The run directory; a sink keeps its files inside."""
    config: Mapping[str, Any]
    """What the run was asked to do; no secrets."""
    description: str = ""
    """The run in a few sentences."""
    tags: tuple[str, ...] = ()
    """Words to filter runs by."""
    is_resumed: bool
    """Whether an earlier part of this run exists, which the sink should go on with."""


class Sink(Protocol):
    """A place that draws curves."""

    @property
    def place(self) -> str:
        """Says where the curves are, for people."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the summary should say about it, such as its folder."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Draws one point in each curve."""

    def finish(self, end: str, error: str | None) -> None:
        """Writes what is left."""


class Opener(Protocol):
    """Opens a sink; raises DstrainError where a person must act, and anything else where it just failed."""

    def __call__(self, setup: Any, say: Say) -> Sink | None:
        """Returns the sink, or None after saying why there is none."""
