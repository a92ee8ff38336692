"""The map of the experts' load for a page: a cell for each expert of each layer, drawn by the template as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dstrain.monitor.expert_balance import COLUMNS, LoadMap, shade
from dstrain.report.curves import Tick

LEGEND = ("0", "< ¼", "¼ – ½", "½ – 0.8", "0.8 – 1.25", "1.25 – 2", "2 – 4", "> 4")
"""Loads of each shade of `expert_balance`."""
_MOST_TICKS = 8
_ROW_REM = 0.75
"""Height of a row, if that keeps the map between these two heights."""
_LEAST_REM, _MOST_REM = 3.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Cells of one color, axes, and the same in words."""

    width: int
    """Cells of a row."""
    height: int
    """Rows."""
    height_rem: float
    """Height on the page."""
    paths: tuple[tuple[int, str], ...]
    """Color, as an index of `LEGEND`, and the path of an SVG that fills all of its cells."""
    x_ticks: tuple[Tick, ...]
    """Numbers of experts."""
    y_ticks: tuple[Tick, ...]
    """Numbers of layers."""
    text: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def heat_map(loads: LoadMap) -> HeatMap:
    """Returns the picture of a map, a row for each layer with experts.

    >>> found = heat_map(LoadMap(step=8, layers=(1, 2), loads=((1.0, 1.1), (2.5, 0.0))))
    >>> found.paths
    ((0, 'M1 1h1v1h-1z'), (4, 'M0 0h2v1h-2z'), (6, 'M0 1h1v1h-1z'))
    """
    paths: dict[int, list[str]] = {}
    for row, of_layer in enumerate(loads.loads):
        start = 0
        for color, cells in groupby(map(shade, of_layer)):
            count = sum(1 for _ in cells)
            paths.setdefault(color, []).append(f"M{start} {row}h{count}v1h-{count}z")
            start += count
    width, height = max(map(len, loads.loads)), len(loads.loads)
    return HeatMap(
        width=width,
        height=height,
        height_rem=min(max(_ROW_REM * height, _LEAST_REM), _MOST_REM),
        paths=tuple((color, "".join(parts)) for color, parts in sorted(paths.items())),
        x_ticks=_ticks(range(width)),
        y_ticks=_ticks(loads.layers),
        text=loads.text,
        columns=COLUMNS,
        rows=loads.rows,
    )


def _ticks(numbers: Sequence[int]) -> tuple[Tick, ...]:
    """Returns the numbers of some cells, at their middle."""
    step = 1
    while len(numbers) > step * _MOST_TICKS:
        step *= 2
    return tuple(Tick(at=100 * (at + 0.5) / len(numbers), text=str(numbers[at])) for at in range(0, len(numbers), step))
