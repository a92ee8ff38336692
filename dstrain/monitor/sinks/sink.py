"""The protocol of a sink, which stores the metrics of a run, and SwanLab's mode, decided before anything can prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dstrain.choices import SwanLabMode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
import shlex

from dstrain.errors import InvalidConfig, did_you_mean

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
    """Job and configuration, without secrets: a number or a text by each key, so that trackers can filter by it."""
    description: str = ""
    """Model, data and machines in a few sentences."""
    tags: tuple[str, ...] = ()
    is_resumed: bool
    """Whether the sink continues an earlier part of this run."""


CELL = 8
"""Pixels along each side of a cell of a picture."""
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
    cells: tuple[tuple[int, ...], ...] = ()
    """A picture of it: the color of each cell as 0xRRGGBB, row by row; empty if it has none."""

    def pixels(self) -> NDArray[np.uint8]:
        """Returns the picture, (height, width, 3), with `CELL` pixels along each side of a cell.

        >>> table = Table(name="x", step=1, text="", columns=(), rows=(), cells=((0xFF8000, 0),))
        >>> table.pixels().shape, table.pixels()[0, 0].tolist()
        ((8, 16, 3), [255, 128, 0])
        """
        import numpy as np

        colors = np.array(self.cells, dtype=np.uint32)
        whole = np.stack([colors >> shift & 0xFF for shift in (16, 8, 0)], axis=-1).astype(np.uint8)
        return whole.repeat(CELL, axis=0).repeat(CELL, axis=1)


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
        """Adds one point to each curve, by its tag (`monitor.curves`)."""

    def show(self, table: Table) -> None:
        """Adds a table, and its text, as far as the sink can show them."""

    def finish(self, end: str, error: str | None) -> None:
        """Flushes and closes; `end` is a value of `End`."""


Opener = Callable[[Any, Say], Sink | None]
"""Returns a sink, or None after printing the reason; raises DstrainError if the user must act, and anything else if it
merely failed."""


def decide_mode(wanted: str | None, environment: Mapping[str, str], *, logged_in: bool) -> SwanLabMode:
    """Returns the mode: the job's, else `SWANLAB_MODE`, else online with a key or a login, else offline.

    Raises InvalidConfig for an unknown mode.

    >>> str(decide_mode(None, {}, logged_in=False))
    'offline'
    >>> str(decide_mode(None, {"SWANLAB_API_KEY": "k"}, logged_in=False))
    'online'
    >>> str(decide_mode("local", {"SWANLAB_MODE": "online"}, logged_in=True))
    'local'
    """
    for source, word in (("monitor: mode", wanted), ("SWANLAB_MODE", environment.get("SWANLAB_MODE"))):
        if word:
            return _parse(source, word)
    return SwanLabMode.ONLINE if environment.get("SWANLAB_API_KEY") or logged_in else SwanLabMode.OFFLINE


def _parse(source: str, word: str) -> SwanLabMode:
    folded = word.strip().lower()
    if folded == "cloud":  # its name before SwanLab 0.8
        return SwanLabMode.ONLINE
    if folded not in set(SwanLabMode):
        raise InvalidConfig(f'{source} is "{word}"', hint=did_you_mean(word, [str(mode) for mode in SwanLabMode]))
    return SwanLabMode(folded)


def has_login(home: Path) -> bool:
    """Returns whether `swanlab login` has stored a key in `home`."""
    return (home / ".swanlab" / ".netrc").is_file()


def upload_command(folders: Sequence[str]) -> str:
    """Returns the command that uploads the parts of a run to one experiment.

    >>> upload_command(["output/swanlog/run-1", "output/swanlog/run-2"])
    'swanlab sync output/swanlog/run-1 output/swanlog/run-2'
    """
    return shlex.join(["swanlab", "sync", *folders])
