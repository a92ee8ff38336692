"""Prints runs side by side: the settings that differ, then what came of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dstrain.config.lint.finding import printable
from dstrain.monitor.comparison import Quantity
from dstrain.monitor.comparison_text import NONE, figure, name_of, off_text
from dstrain.paths import shown
from dstrain.report.report import Report, differing
from dstrain.units import format_count

_MOST_CHARACTERS = 28
"""Longest cell."""


def table(reports: Sequence[Report]) -> list[list[str]]:
    """Returns runs side by side, as rows of cells: the settings that differ, then what came of them."""
    rows = [["", *(_cell(shown(str(one.recorded.run_dir.path))) for one in reports)]]
    for key, values in differing(reports).items():
        rows.append([key, *map(_cell, values)])
    rows.append(["hand edits", *(_count(one.recorded.edits) for one in reports)])
    rows.append(["end", *(f"{one.stage}: {one.stopped_by}" if one.stopped_by else one.stage for one in reports)])
    rows.append(["steps", *(f"{one.step:,}" for one in reports)])
    rows.append(["loss", *(f"{one.losses[-1][1]:.4f}" if one.losses else NONE for one in reports)])
    best = [min((value for _, value in one.evaluations), default=None) for one in reports]
    rows.append(["best evaluation", *(NONE if value is None else f"{value:.4f}" for value in best)])
    for quantity in Quantity:
        found = [next((each for each in one.comparisons if each.quantity is quantity), None) for one in reports]
        if any(each is not None for each in found):
            cells = [NONE if each is None else figure(quantity, each.measured) for each in found]
            offs = [off_text(each).split(" (")[0] if each is not None else "" for each in found]
            rows.append(
                [
                    name_of(quantity, reports[0].recorded.cluster),
                    *(f"{c} ({o})" if o else c for c, o in zip(cells, offs, strict=True)),
                ]
            )
    tokens = [one.recorded.windows[-1].get("tokens_seen") if one.recorded.windows else None for one in reports]
    rows.append(["tokens", *(format_count(seen) if isinstance(seen, int) else NONE for seen in tokens)])
    rows.append(["health", *(", ".join(mark.rule for mark in one.marks) or "good" for one in reports)])
    rows.append(["restarts", *(str(len(one.restarts)) for one in reports)])
    return rows


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as text, with cut cells; the end of a key says more than its beginning."""
    rows = [[_cell(row[0]), *row[1:]] for row in rows]
    cut = [
        [printable(c if len(c) <= _MOST_CHARACTERS else f"{c[: _MOST_CHARACTERS - 1]}…") for c in row] for row in rows
    ]
    widths = [max(len(row[at]) for row in cut) for at in range(len(cut[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut]


def _cell(value: object) -> str:
    """Returns the value of a setting; a path by its end, which differs."""
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else f"…{value[1 - _MOST_CHARACTERS :]}"
    return NONE if value is None else json.dumps(value, ensure_ascii=False)


def _count(edits: Sequence[Any] | None) -> str:
    return NONE if edits is None else str(len(edits))
