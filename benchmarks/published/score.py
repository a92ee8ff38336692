"""How right predictions are: errors, bias, verdicts, rank correlation. Values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from benchmarks.published.answers import Answer, Comparison, Side, Verdict, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Accuracy targets of the planner."""

    allocated_mean: float = 0.03
    """Mean error of allocated bytes over rows of quality A."""
    allocated_worst: float = 0.10
    """Worst error of those rows."""
    reserved_mean: float = 0.06
    """Mean error of reserved bytes."""
    nvidia_smi_mean: float = 0.08
    """Mean error of nvidia-smi figures."""
    verdicts_right: float = 0.95
    """Share of runs with a right verdict on whether they fit."""
    verdict_margin: float = 0.05
    """No run that ran out of memory may be said to fit with so much of the GPU to spare."""
    speed_mean: float = 0.20
    """Mean error of throughput."""
    rank_correlation: float = 0.90
    """Spearman's correlation within each table."""


BARS = Bars()


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of a set of comparisons; ratios, 0.03 is three percent."""

    count: int
    """Comparisons."""
    mean: float
    """Mean absolute counted error."""
    median: float
    """Median absolute counted error."""
    worst: float
    """Largest absolute counted error."""
    bias: float
    """Mean error with its sign, both sides counted."""
    worst_id: str
    """The row of the largest."""


def errors(comparisons: Iterable[Comparison]) -> Errors | None:
    """Returns the errors of comparisons, or None for none.

    >>> from benchmarks.published.answers import Side
    >>> made = [Comparison(id=str(p), table="t", basis="b", quality="A", measured=100, predicted=p, side=Side.BOTH)
    ...         for p in (98, 104)]
    >>> summary = errors(made)
    >>> round(summary.mean, 3), round(summary.worst, 3), round(summary.bias, 3), summary.worst_id
    (0.03, 0.04, 0.01, '104')
    """
    rows = list(comparisons)
    if not rows:
        return None
    sizes = [abs(comparison.counted_error) for comparison in rows]
    worst = max(rows, key=lambda comparison: abs(comparison.counted_error))
    return Errors(
        count=len(rows),
        mean=sum(sizes) / len(sizes),
        median=median(sizes),
        worst=abs(worst.counted_error),
        bias=sum(comparison.error_ratio for comparison in rows) / len(rows),
        worst_id=worst.id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """Counts of verdicts."""

    fits_right: int
    """Said to fit, and fitted."""
    oom_right: int
    """Said not to fit, and ran out of memory."""
    said_fits: tuple[str, ...]
    """Said to fit, but ran out of memory: rows."""
    said_oom: tuple[str, ...]
    """Said not to fit, but fitted: rows."""
    far_off: tuple[str, ...]
    """Of `said_fits`, those said to leave more than the margin free."""
    unclear: int
    """Said not to fit at the longest samples, and fitted with shorter ones: neither right nor wrong."""

    @property
    def count(self) -> int:
        """Verdicts that count."""
        return self.fits_right + self.oom_right + len(self.said_fits) + len(self.said_oom)

    @property
    def right_ratio(self) -> float:
        """Share of right verdicts, 0…1."""
        return (self.fits_right + self.oom_right) / self.count if self.count else 0.0


def confusion(verdicts: Iterable[Verdict], margin: float = BARS.verdict_margin) -> Confusion:
    """Returns the counts of verdicts."""
    rows = list(verdicts)
    counted = [comparison for comparison in rows if comparison.counts]
    said_fits = [comparison for comparison in counted if comparison.says_fits and not comparison.fitted]
    return Confusion(
        fits_right=sum(comparison.says_fits and comparison.fitted for comparison in counted),
        oom_right=sum(not comparison.says_fits and not comparison.fitted for comparison in counted),
        said_fits=tuple(comparison.id for comparison in said_fits),
        said_oom=tuple(comparison.id for comparison in counted if not comparison.says_fits and comparison.fitted),
        far_off=tuple(comparison.id for comparison in said_fits if comparison.predicted_ratio < 1 - margin),
        unclear=len(rows) - len(counted),
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns Spearman's rank correlation with ties at their mean rank; None for fewer than three, or all alike.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20), (4, 40)])
    0.8
    """
    if len(pairs) < 3:
        return None
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) + 1) / 2
    product = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    norms = [sum((rank - mean) ** 2 for rank in ranks) for ranks in (first, second)]
    if not all(norms):
        return None
    return float(round(product / math.sqrt(norms[0] * norms[1]), 12))


def ratio_errors(answers: Iterable[Answer]) -> list[float]:
    """Returns the errors of predicted ratios of throughput, smallest first: of all pairs of runs that differ in how a
    model is trained, but not in model, method, source, length of samples and GPUs."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for answer in answers:
        row, speed = answer.row, answer.speed
        if speed is not None:
            key = (row.source, row.model, row.method, row.gpu, row.num_gpus, row.seq_len)
            groups.setdefault(key, []).append(speed.predicted / speed.measured)
    pairs = (pair for errors in groups.values() for pair in combinations(errors, 2))
    return sorted(max(pair) / min(pair) - 1 for pair in pairs)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One line of a report."""

    name: str
    """Basis or table."""
    published: int
    """Rows that publish the figure."""
    errors: Errors | None
    """Errors of those in scope."""
    rank_correlation: float | None = None
    """Of throughput, within the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Everything that the report shows."""

    rows: int
    """Rows of the table."""
    asked: int
    """Rows with at least one part in scope."""
    refused: tuple[tuple[str, str], ...]
    """Rows in scope that the planner refused, and why."""
    bases: tuple[Group, ...]
    """Memory by basis, rows of quality A first, then all."""
    tables: tuple[Group, ...]
    """Memory by basis and table."""
    verdicts: Confusion
    """Fits or not."""
    speed: Group
    """Throughput of all tables."""
    speed_known: Group
    """Of those whose lengths of samples are known."""
    speed_tables: tuple[Group, ...]
    """Throughput by table."""
    ratio_errors: tuple[float, ...]
    """Errors of ratios of throughput (`ratio_errors`)."""


def score(answers: Sequence[Answer]) -> Score:
    """Returns the score of answers."""
    memory = [comparison for answer in answers for comparison in answer.memory]
    speeds = [answer.speed for answer in answers if answer.speed is not None]
    published = _published(answers)
    bases = []
    for basis in ("allocated", "reserved", "nvidia-smi", "unknown"):
        of_basis = [comparison for comparison in memory if comparison.basis == basis]
        for label, chosen in ((f"{basis}, A", "A"), (basis, "ABC")):
            rows = [comparison for comparison in of_basis if comparison.quality in chosen]
            count = sum(
                number for (name, _, quality), number in published.items() if name == basis and quality in chosen
            )
            bases.append(Group(name=label, published=count, errors=errors(rows)))
        known = [comparison for comparison in of_basis if comparison.side is Side.BOTH]
        bases.append(Group(name=f"{basis}, lengths known", published=len(known), errors=errors(known)))
    keys = sorted({(comparison.basis, comparison.table) for comparison in memory})
    tables = [
        Group(
            name=f"{basis}: {table}",
            published=sum(number for (b, t, _), number in published.items() if (b, t) == (basis, table)),
            errors=errors(
                comparison for comparison in memory if (comparison.basis, comparison.table) == (basis, table)
            ),
        )
        for basis, table in keys
    ]
    return Score(
        rows=len(answers),
        asked=sum(answer.prediction is not None for answer in answers),
        refused=tuple((each.row.id, each.prediction) for each in answers if isinstance(each.prediction, str)),
        bases=tuple(bases),
        tables=tuple(tables),
        verdicts=confusion(answer.verdict for answer in answers if answer.verdict is not None),
        speed=_speed_group("all tables", speeds, sum(answer.row.throughput is not None for answer in answers)),
        speed_known=_speed_group(
            "lengths known", [comparison for comparison in speeds if comparison.side is Side.BOTH], len(speeds)
        ),
        speed_tables=tuple(_speed_tables(speeds, published)),
        ratio_errors=tuple(ratio_errors(answers)),
    )


def _speed_tables(speeds: Sequence[Comparison], published: dict[tuple[str, str, str], int]) -> Iterable[Group]:
    for table in sorted({comparison.table for comparison in speeds}):
        count = sum(number for (name, where, _), number in published.items() if (name, where) == ("speed", table))
        yield _speed_group(table, [comparison for comparison in speeds if comparison.table == table], count)


def _speed_group(name: str, rows: Sequence[Comparison], published: int) -> Group:
    return Group(
        name=name,
        published=published,
        errors=errors(rows),
        rank_correlation=rank_correlation([(comparison.measured, comparison.predicted) for comparison in rows]),
    )


def _published(answers: Sequence[Answer]) -> dict[tuple[str, str, str], int]:
    """Returns the number of rows by published basis (or `speed`), table and quality."""
    counts: dict[tuple[str, str, str], int] = {}
    for answer in answers:
        row = answer.row
        names = []
        if row.allocated_bytes is not None:
            names.append("allocated")
        if row.nvidia_smi_bytes is not None and row.outcome == "fits":
            names.append("nvidia-smi")
        if row.basis in ("reserved", "unknown"):
            names.append(str(row.basis))
        if row.throughput is not None:
            names.append("speed")
        for name in names:
            key = (name, table_of(row), row.quality)
            counts[key] = counts.get(key, 0) + 1
    return counts
