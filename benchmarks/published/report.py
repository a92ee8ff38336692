"""The report of a score: text for a terminal, Markdown for the README, and one row explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from benchmarks.published.answers import Answer, Comparison, answer
from benchmarks.published.figures import Figures, estimate, predicted
from benchmarks.published.question import ask
from benchmarks.published.rows import Row
from benchmarks.published.score import BARS, Confusion, Errors, Group, Score
from dstrain.plan.estimate_records import Estimate
from dstrain.units import GIB


def _percent(ratio: float, *, signed: bool = False) -> str:
    return f"{100 * ratio:{'+' if signed else ''}.1f} %"


def _cells(name: str, published: int, errors: Errors | None) -> list[str]:
    """Returns the cells of one line: name, published, in scope, coverage, mean, worst, bias, row of the worst."""
    if errors is None:
        return [name, str(published), "0", "0 %", "", "", "", ""]
    coverage = f"{100 * errors.count / published:.0f} %" if published else ""
    return [
        name,
        str(published),
        str(errors.count),
        coverage,
        _percent(errors.mean),
        _percent(errors.worst),
        _percent(errors.bias, signed=True),
        errors.worst_id,
    ]


_HEAD = ["", "published", "asked", "coverage", "mean error", "worst", "bias", "worst row"]


def text(score: Score) -> str:
    """Returns the whole report as text."""
    parts = [
        f"{score.rows} rows, {score.asked} asked, {len(score.refused)} refused",
        "Memory by basis (A: configuration known)\n" + _columns(_HEAD, _lines(score.bases)),
        "Memory by table\n" + _columns(_HEAD, _lines(score.tables)),
        "Fits or not\n" + _verdicts(score.verdicts),
        "Throughput\n" + _columns([*_HEAD, "rank"], _speed_lines(score)),
        "Ratios of throughput of two runs of one model on as many GPUs\n" + _ratios(score.ratio_errors),
    ]
    if score.refused:
        parts.append("Refused\n" + "\n".join(f"  {row}: {why}" for row, why in score.refused))
    parts.append(
        "Bars\n" + "\n".join(f"  {'reached' if is_reached else 'MISSED '}  {line}" for line, is_reached in bars(score))
    )
    return "\n\n".join(parts)


def _ratios(errors: Sequence[float]) -> str:
    """Returns how many ratios are predicted within some percent."""
    within = ", ".join(
        f"{100 * sum(error <= limit for error in errors) / len(errors):.0f} % within {100 * limit:.0f} %"
        for limit in (0.02, 0.05, 0.10, 0.20)
    )
    return f"  {len(errors)} pairs: {within}" if errors else "  none"


def _lines(groups: Iterable[Group]) -> list[list[str]]:
    return [_cells(group.name, group.published, group.errors) for group in groups]


def _speed_lines(score: Score) -> list[list[str]]:
    sums = (score.speed, score.speed_known)
    return [
        [*_cells(group.name, group.published, group.errors), "" if group in sums else _rank(group)]
        for group in (*sums, *score.speed_tables)
    ]


def _rank(group: Group) -> str:
    return "" if group.rank_correlation is None else f"{group.rank_correlation:.2f}"


def _columns(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [list(head), *[list(line) for line in lines]]
    widths = [max(len(line[place]) for line in table) for place in range(len(head))]
    rows = []
    for line in table:
        cells = [
            cell.ljust(width) if place in (0, 7) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        rows.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(rows)


def _verdicts(confusion: Confusion) -> str:
    """Returns the confusion table in words."""
    lines = [
        f"  ran, said to fit            {confusion.fits_right:4d}",
        f"  out of memory, said so      {confusion.oom_right:4d}",
        f"  out of memory, said to fit  {len(confusion.said_fits):4d}  {' '.join(confusion.said_fits)}",
        f"  ran, said not to fit        {len(confusion.said_oom):4d}  {' '.join(confusion.said_oom)}",
        f"  said to fit with more than {100 * BARS.verdict_margin:.0f} % to spare, out of memory:"
        f" {len(confusion.far_off)}  {' '.join(confusion.far_off)}",
        f"  neither (ran with shorter samples than the longest, which would not fit): {confusion.unclear}",
        f"  right: {_percent(confusion.right_ratio)} of {confusion.count}",
    ]
    return "\n".join(lines)


def bars(score: Score) -> list[tuple[str, bool]]:
    """Returns each bar with the value, and whether the value reaches it."""
    by_name = {group.name: group.errors for group in score.bases}
    lines: list[tuple[str, bool]] = []

    def add(name: str, value: float | None, limit: float, *, least: bool = False) -> None:
        if value is None:
            lines.append((f"{name}: nothing to compare", False))
            return
        is_reached = value >= limit if least else value <= limit
        lines.append(
            (f"{name}: {_percent(value)} ({'at least' if least else 'at most'} {_percent(limit)})", is_reached)
        )

    for basis, mean, worst in (
        ("allocated, A", BARS.allocated_mean, BARS.allocated_worst),
        ("reserved, A", BARS.reserved_mean, None),
        ("nvidia-smi, A", BARS.nvidia_smi_mean, None),
    ):
        errors = by_name.get(basis)
        add(f"{basis}, mean error", errors.mean if errors else None, mean)
        if worst is not None:
            add(f"{basis}, worst", errors.worst if errors else None, worst)
    add("fits or not, right", score.verdicts.right_ratio, BARS.verdicts_right, least=True)
    far_off = score.verdicts.far_off
    lines.append((f"said to fit with room to spare, out of memory: {len(far_off)} (at most 0)", not far_off))
    speed = score.speed.errors
    add("throughput, mean error", speed.mean if speed else None, BARS.speed_mean)
    ranks = [group.rank_correlation for group in score.speed_tables if group.rank_correlation is not None]
    add("throughput, lowest rank correlation of a table", min(ranks, default=None), BARS.rank_correlation, least=True)
    return lines


def markdown(score: Score) -> str:
    """Returns a table: memory by basis, verdicts, throughput by table."""
    head = ["What is compared", "Published", "Predicted", "Mean error", "Worst", "Bias", "Rank correlation"]
    lines = []
    for group in score.bases:
        if group.errors is None or not group.published:
            continue
        lines.append([*_markdown_cells(group), ""])
    for group in (score.speed, score.speed_known, *score.speed_tables):
        if group.errors is None:
            continue
        rank = "" if group in (score.speed, score.speed_known) else _rank(group)
        named = Group(name=f"throughput, {group.name}", published=group.published, errors=group.errors)
        lines.append([*_markdown_cells(named), rank])
    table = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in table)
    verdicts = score.verdicts
    return (
        f"{rows}\n\nWhether a run fits is predicted correctly for {verdicts.fits_right + verdicts.oom_right} of"
        f" {verdicts.count} runs ({_percent(verdicts.right_ratio)}); {len(verdicts.said_fits)} were predicted to fit"
        f" and ran out of memory, {len(verdicts.said_oom)} were predicted not to fit and ran."
    )


def _markdown_cells(group: Group) -> list[str]:
    errors = group.errors
    assert errors is not None
    return [
        group.name,
        str(group.published),
        str(errors.count),
        _percent(errors.mean),
        _percent(errors.worst),
        _percent(errors.bias, signed=True),
    ]


def worst(answers: Sequence[Answer], count: int) -> str:
    """Returns the comparisons with the largest errors, one per line."""
    comparisons = [
        comparison for answer in answers for comparison in (*answer.memory, answer.speed) if comparison is not None
    ]
    comparisons.sort(key=lambda comparison: -abs(comparison.counted_error))
    return "\n".join(_comparison(comparison) for comparison in comparisons[:count])


def _comparison(comparison: Comparison) -> str:
    if comparison.basis == "tokens/s/GPU":
        figures = f"{comparison.measured:10.0f} {comparison.predicted:10.0f} tokens/s"
    else:
        figures = f"{comparison.measured / GIB:9.2f} {comparison.predicted / GIB:9.2f} GiB"
    counts = "" if comparison.counted_error else "  (does not count)" if comparison.error_ratio else ""
    error = _percent(comparison.error_ratio, signed=True)
    return f"{comparison.id:44s} {comparison.basis:12s} {comparison.quality} {figures} {error:>9s}{counts}"


def explain(row: Row) -> str:
    """Returns one row: the question, the parts of the planner's prediction, and the measurements."""
    said = answer(row, predicted(row))
    lines = [f"{row.id}: {row.model}, {row.method}, {row.source}", f"  notes: {row.notes}"]
    for name, reason in (("memory", said.scope.memory), ("speed", said.scope.speed)):
        if reason is not None:
            lines.append(f"  {name} cannot be asked: {reason}")
    if said.prediction is not None:
        question = ask(row)
        lines.append(f"  model: {question.model.name} ({question.stands_for or question.model.source})")
        lines.append(f"  cluster: {question.cluster.num_gpus} × {question.cluster.gpu.name}")
        asked = question.configuration
        lines += [f"    {field.name} = {getattr(asked, field.name)}" for field in fields(asked)]
        if isinstance(said.prediction, Figures):
            lines += _parts(estimate(question), has_speed=said.speed is not None)
        else:
            lines.append(f"  refused: {said.prediction}")
    lines += [f"  {_comparison(comparison)}" for comparison in (*said.memory, said.speed) if comparison is not None]
    if said.verdict is not None:
        lines.append(f"  fitted: {said.verdict.fitted}; predicted {_percent(said.verdict.predicted_ratio)} of the GPU")
    return "\n".join(lines)


def _parts(found: Estimate, *, has_speed: bool) -> Iterable[str]:
    """Yields the parts of memory and, if it is compared, of the step's time."""
    yield f"  peak at: {found.memory.peak_instant}"
    for name, value in asdict(found.memory.breakdown_bytes).items():
        if value:
            yield f"    {name:14s} {value / GIB:9.3f} GiB"
    if found.speed is not None and has_speed:
        yield f"  step limited by: {found.speed.limited_by}"
        yield from (f"    {name:22s} {value:9.4f} s" for name, value in found.speed.parts_s.items())
