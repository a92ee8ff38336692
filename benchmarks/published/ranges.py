"""What 80 % of predicted step times are off by at most, by kind of question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from benchmarks.published.answers import Answer, Side, table_of
from benchmarks.published.halves import Half
from benchmarks.published.question import ask
from dstrain.plan.speed.step_time import ErrorRange, Extent, extent, is_compared

COVERAGE = 0.8
"""Share of predictions inside a range."""
FEWEST = 10
"""Runs that a kind needs, from two tables."""

Kind = tuple[Extent, bool]
"""How many GPUs, and whether the whole model trains."""


def error_ranges(answers: Sequence[Answer], halves: Mapping[str, Half]) -> tuple[ErrorRange, ...]:
    """Returns the ranges of the kinds of question that have enough runs in the unseen half, rounded up to percent."""
    found = sorted(_errors(answers, halves), key=lambda error: error[0])
    ranges = []
    for kind, errors in groupby(found, key=lambda error: error[0]):
        rows = [(table, size) for _, table, size in errors]
        tables = {table for table, _ in rows}
        if len(rows) >= FEWEST and len(tables) >= 2:
            ranges.append(
                ErrorRange(extent=kind[0], is_full=kind[1], ratio=covering(rows), runs=len(rows), tables=len(tables))
            )
    return tuple(ranges)


def _errors(answers: Iterable[Answer], halves: Mapping[str, Half]) -> Iterable[tuple[Kind, str, float]]:
    """Yields kind, table and absolute error of each throughput that counts on both sides."""
    for one in answers:
        table = table_of(one.row)
        if one.speed is None or one.speed.side is not Side.BOTH or halves.get(table) is not Half.UNSEEN:
            continue
        question = ask(one.row)
        if is_compared(question.cluster):
            yield (extent(question.cluster), question.configuration.model.is_full), table, abs(one.speed.error_ratio)


def covering(rows: Sequence[tuple[str, float]]) -> float:
    """Returns the least whole percent that covers `COVERAGE` of the errors, each table counting as much as any other.

    >>> covering([("a", 0.1), ("a", 0.104), ("b", 0.02), ("b", 0.3)])
    0.3
    """
    sizes = Counter(table for table, _ in rows)
    inside = 0.0
    for table, size in sorted(rows, key=lambda row: row[1]):
        inside += 1 / sizes[table] / len(sizes)
        if inside >= COVERAGE - 1e-9:
            return -int(-100 * size // 1) / 100
    return 1.0


def as_code(ranges: Iterable[ErrorRange]) -> str:
    """Returns the table as it stands in dstrain/plan/speed/step_time.py."""
    lines = [
        f"    ErrorRange(extent=Extent.{found.extent.name}, is_full={found.is_full}, ratio={found.ratio},"
        f" runs={found.runs}, tables={found.tables}),"
        for found in ranges
    ]
    return "\n".join(["ERROR_RANGES = (", *lines, ")"])


def markdown(ranges: Iterable[ErrorRange]) -> str:
    """Returns the table of docs/accuracy.md."""
    lines = ["| GPUs | trained | 80 % are within | runs | tables |", "|---|---|---:|---:|---:|"]
    for found in ranges:
        trained = "whole model" if found.is_full else "adapter"
        lines.append(f"| {found.extent} | {trained} | ± {100 * found.ratio:.0f} % | {found.runs} | {found.tables} |")
    return "\n".join(lines)
