"""How right predictions are on each half of the published tables: only rows whose question is exactly what ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.published.answers import Answer, Comparison, Side, is_bound, table_of
from benchmarks.published.halves import Half
from benchmarks.published.rows import Basis
from benchmarks.published.score import Confusion, Errors, confusion, errors, rank_correlation


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfBars:
    """Accuracy targets on the unseen half."""

    speed_mean: float = 0.20
    """Mean error of throughput."""
    speed_median: float = 0.12
    """Median error of throughput."""
    rank_correlation: float = 0.90
    """Spearman's correlation within each table."""
    allocated_mean: float = 0.02
    """Mean error of allocated bytes."""
    nvidia_smi_mean: float = 0.04
    """Mean error of nvidia-smi figures."""
    verdicts_right: float = 0.97
    """Share of right verdicts."""
    false_alarms: float = 0.02
    """Share of verdicts that call a run that fitted out of memory."""


HALF_BARS = HalfBars()
APART = 0.05
"""Ratio by which two runs have to differ to have an order: less is what runs of one recipe differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfScore:
    """The score of one half."""

    half: Half
    """The half."""
    tables: int
    """Its tables."""
    speed: Errors | None
    """Throughput."""
    ranks: Mapping[str, float]
    """Spearman's correlation of throughput by table."""
    order: tuple[int, int]
    """Pairs of runs of a table whose throughput differs by more than `APART`: in the right order, and all."""
    allocated: Errors | None
    """Allocated bytes."""
    nvidia_smi: Errors | None
    """What nvidia-smi shows."""
    verdicts: Confusion
    """Fits or not."""
    bounds: int
    """Rows left out because only an upper bound of their samples' length is published."""

    @property
    def false_alarm_ratio(self) -> float:
        """Share of verdicts that call a run that fitted out of memory, 0…1."""
        return len(self.verdicts.said_oom) / self.verdicts.count if self.verdicts.count else 0.0


def half_score(answers: Sequence[Answer], halves: Mapping[str, Half], half: Half) -> HalfScore:
    """Returns the score of the answers whose table is in `half`.

    A row whose samples may be shorter than stated is not asked fairly: a prediction for the stated length can be wrong
    on one side only, so its errors would flatter. `tests/published/scope.csv` names these rows.
    """
    mine = [one for one in answers if halves.get(table_of(one.row)) is half]
    memory = [comparison for one in mine for comparison in one.memory if comparison.side is Side.BOTH]
    speeds = [one.speed for one in mine if one.speed is not None and one.speed.side is Side.BOTH]
    verdicts = [one.verdict for one in mine if one.verdict is not None and one.verdict.side is Side.BOTH]
    return HalfScore(
        half=half,
        tables=len({table_of(one.row) for one in mine}),
        speed=errors(speeds),
        ranks=_ranks(speeds),
        order=_order(speeds),
        allocated=errors(comparison for comparison in memory if comparison.basis == Basis.ALLOCATED),
        nvidia_smi=errors(comparison for comparison in memory if comparison.basis == Basis.NVIDIA_SMI),
        verdicts=confusion(verdicts),
        bounds=sum(is_bound(one.row) and one.prediction is not None for one in mine),
    )


def _ranks(speeds: Sequence[Comparison]) -> dict[str, float]:
    """Returns Spearman's correlation of predicted and measured throughput by table."""
    found = {table: rank_correlation(runs) for table, runs in sorted(_by_table(speeds).items())}
    return {table: rank for table, rank in found.items() if rank is not None}


def _order(speeds: Sequence[Comparison]) -> tuple[int, int]:
    """Returns how many pairs of runs of a table are in the right order, and of how many that are clearly apart."""
    pairs = [pair for runs in _by_table(speeds).values() for pair in combinations(sorted(runs), 2)]
    apart = [(slow, fast) for slow, fast in pairs if fast[0] > (1 + APART) * slow[0]]
    return sum(fast[1] > slow[1] for slow, fast in apart), len(apart)


def _by_table(speeds: Sequence[Comparison]) -> dict[str, list[tuple[float, float]]]:
    """Returns measured and predicted throughput of the runs of each table."""
    tables: dict[str, list[tuple[float, float]]] = {}
    for comparison in speeds:
        tables.setdefault(comparison.table, []).append((comparison.measured, comparison.predicted))
    return tables
