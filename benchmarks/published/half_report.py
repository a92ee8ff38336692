"""The report on both halves of the published tables: text for a terminal, Markdown for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.published.answers import Answer, Comparison, Side, Verdict, table_of
from benchmarks.published.halves import Half
from benchmarks.published.out_of_sample import APART, HALF_BARS, HalfScore
from benchmarks.published.question import is_traced, runs_deepspeed
from benchmarks.published.rows import Basis
from benchmarks.published.score import Errors, confusion, errors

HEAD = ("figure", "fit", "runs", "unseen", "runs", "bar", "")
"""Columns of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One line: how to read a figure, how many comparisons it has, and its bar on the unseen half."""

    name: str
    value: Callable[[HalfScore], float | None]
    count: Callable[[HalfScore], int]
    bar: float | None = None
    is_least: bool = False
    """Whether the bar is the least value, in place of the largest."""
    is_ratio: bool = True
    """Whether the value is shown in percent."""
    is_signed: bool = False

    def shown(self, score: HalfScore) -> str:
        """Returns the figure as text, empty without one."""
        value = self.value(score)
        return "" if value is None else self._text(value)

    def target(self) -> str:
        """Returns the bar as text."""
        return "" if self.bar is None else f"{'≥' if self.is_least else '≤'} {self._text(self.bar)}"

    def reaches(self, score: HalfScore) -> bool | None:
        """Returns whether the figure reaches its bar, or None without a bar."""
        value = self.value(score)
        if self.bar is None or value is None:
            return None
        return value >= self.bar if self.is_least else value <= self.bar

    def _text(self, value: float) -> str:
        if not self.is_ratio:
            return f"{value:.2f}"
        return f"{100 * value:{'+' if self.is_signed else ''}.1f} %"


def _of(errors: Errors | None, name: str) -> float | None:
    return None if errors is None else getattr(errors, name)


def _count(errors: Errors | None) -> int:
    return 0 if errors is None else errors.count


FIGURES = (
    _Figure(
        name="throughput, mean error",
        value=lambda score: _of(score.speed, "mean"),
        count=lambda score: _count(score.speed),
        bar=HALF_BARS.speed_mean,
    ),
    _Figure(
        name="throughput, median error",
        value=lambda score: _of(score.speed, "median"),
        count=lambda score: _count(score.speed),
        bar=HALF_BARS.speed_median,
    ),
    _Figure(
        name="throughput, bias",
        value=lambda score: _of(score.speed, "bias"),
        count=lambda score: _count(score.speed),
        is_signed=True,
    ),
    _Figure(
        name="throughput, rank correlation in a table, lowest",
        value=lambda score: min(score.ranks.values(), default=None),
        count=lambda score: len(score.ranks),
        bar=HALF_BARS.rank_correlation,
        is_least=True,
        is_ratio=False,
    ),
    _Figure(
        name="throughput, rank correlation in a table, median",
        value=lambda score: median(score.ranks.values()) if score.ranks else None,
        count=lambda score: len(score.ranks),
        is_ratio=False,
    ),
    _Figure(
        name=f"throughput, pairs of a table over {100 * APART:.0f} % apart in the right order",
        value=lambda score: score.order[0] / score.order[1] if score.order[1] else None,
        count=lambda score: score.order[1],
    ),
    _Figure(
        name="allocated, mean error",
        value=lambda score: _of(score.allocated, "mean"),
        count=lambda score: _count(score.allocated),
        bar=HALF_BARS.allocated_mean,
    ),
    _Figure(
        name="nvidia-smi, mean error",
        value=lambda score: _of(score.nvidia_smi, "mean"),
        count=lambda score: _count(score.nvidia_smi),
        bar=HALF_BARS.nvidia_smi_mean,
    ),
    _Figure(
        name="fits or not, right",
        value=lambda score: score.verdicts.right_ratio if score.verdicts.count else None,
        count=lambda score: score.verdicts.count,
        bar=HALF_BARS.verdicts_right,
        is_least=True,
    ),
    _Figure(
        name="fits or not, false alarms",
        value=lambda score: score.false_alarm_ratio if score.verdicts.count else None,
        count=lambda score: score.verdicts.count,
        bar=HALF_BARS.false_alarms,
    ),
)
"""The lines of the report."""


def missed(unseen: HalfScore) -> list[str]:
    """Returns the names of the figures that miss their bar."""
    return [figure.name for figure in FIGURES if figure.reaches(unseen) is False]


def _lines(fit: HalfScore, unseen: HalfScore) -> list[tuple[str, ...]]:
    """Returns the cells of each line."""
    words = {True: "reached", False: "missed", None: ""}
    return [
        (
            figure.name,
            figure.shown(fit),
            str(figure.count(fit)),
            figure.shown(unseen),
            str(figure.count(unseen)),
            figure.target(),
            words[figure.reaches(unseen)],
        )
        for figure in FIGURES
    ]


def _notes(fit: HalfScore, unseen: HalfScore) -> str:
    return (
        f"{fit.tables} tables set constants, {unseen.tables} do not. Of the rows asked, {fit.bounds} and"
        f" {unseen.bounds} count in no figure here: their source gives only an upper bound of the samples' length."
    )


def text(fit: HalfScore, unseen: HalfScore) -> str:
    """Returns both halves as text: figures, rank correlations by table, wrong verdicts."""
    lines = [HEAD, *_lines(fit, unseen)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEAD))]
    shown = ["Halves (constants are set on 'fit' alone)", f"  {_notes(fit, unseen)}"]
    for line in lines:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append(("  " + "  ".join(cells)).rstrip())
    for score in (fit, unseen):
        ranks = ", ".join(f"{table} {rank:.2f}" for table, rank in score.ranks.items())
        shown.append(f"  rank correlations, {score.half}: {ranks or 'none'}")
        shown.append(f"  said to fit, ran out of memory, {score.half}: {_ids(score.verdicts.said_fits)}")
        shown.append(f"  said not to fit, ran, {score.half}: {_ids(score.verdicts.said_oom)}")
    return "\n".join(shown)


def _ids(rows: Sequence[str]) -> str:
    return " ".join(rows) or "none"


def markdown(fit: HalfScore, unseen: HalfScore) -> str:
    """Returns both halves as a table."""
    lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *_lines(fit, unseen)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{_notes(fit, unseen)}"


def figures(answers: Sequence[Answer], halves: Mapping[str, Half], later: Sequence[Answer]) -> str:
    """Returns the figures of the README, each with whose runs it is of: the unseen half, all of DeepSpeed, those of
    publishers that came later, and the families whose layers are traced."""
    unseen = [one for one in answers if halves.get(table_of(one.row)) is Half.UNSEEN]
    memory = [comparison for one in unseen for comparison in one.memory if comparison.side is Side.BOTH]
    verdicts = [one.verdict for one in unseen if one.verdict is not None and one.verdict.side is Side.BOTH]
    wrong = 100 - 100 * confusion(verdicts).right_ratio
    deepspeed = [comparison for one in answers if runs_deepspeed(one.row) for comparison in one.memory]
    traced = [comparison for one in (*answers, *later) if is_traced(one.row) for comparison in one.memory]
    lines = [
        _line("memory of tensors at the peak", [each for each in memory if each.basis == Basis.ALLOCATED]),
        _line("memory as nvidia-smi shows it", [each for each in memory if each.basis == Basis.NVIDIA_SMI]),
        f"| fits or not | {_projects(verdicts)} | {wrong:.1f} % wrong | {len(verdicts)} |",
        _line("memory under DeepSpeed", [each for each in deepspeed if each.side is Side.BOTH]),
        _line("tokens/s, publishers known", _speeds(unseen)),
        _line("tokens/s, publishers never seen", _speeds(later)),
        _line("families whose layers are traced (no layer code)", traced),
    ]
    return "\n".join(["| figure | runs of | out of sample | runs |", "|---|---|---:|---:|", *lines])


def _speeds(answers: Sequence[Answer]) -> list[Comparison]:
    return [one.speed for one in answers if one.speed is not None and one.speed.side is Side.BOTH]


def _line(name: str, comparisons: Sequence[Comparison]) -> str:
    """Returns a line with mean and median error, and the worst; or that no run was published."""
    found = errors(comparisons)
    if found is None:
        return f"| {name} | none published | not known | 0 |"
    shown = f"mean error {100 * found.mean:.1f} %, median {100 * found.median:.1f} %, worst {100 * found.worst:.0f} %"
    return f"| {name} | {_projects(comparisons)} | {shown} | {found.count} |"


def _projects(rows: Sequence[Comparison | Verdict]) -> str:
    """Returns the projects that measured, most runs first; beyond three how many more."""
    counts = Counter(row.table.partition(" ")[0] for row in rows).most_common()
    others = len(counts) - 3
    return ", ".join(f"{name} {count}" for name, count in counts[:3]) + (f", {others} others" if others > 0 else "")
