"""Writes the reports of runs as one HTML page with curves and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from typing import Any

from dstrain import __version__
from dstrain.findings import printable
from dstrain.monitor.comparison import NAMES, Part, Quantity, figure, measured_text, name_of, off_text
from dstrain.monitor.expert_balance import COLUMNS, LoadMap, shade
from dstrain.monitor.windows import counted, series
from dstrain.oom import Part as Held
from dstrain.paths import shown
from dstrain.plan.labels import label
from dstrain.report import text
from dstrain.report.html import CHINESE as PLAN_CHINESE
from dstrain.report.html import render
from dstrain.report.report import UNKNOWN, Report
from dstrain.rundir import GONE, Stage
from dstrain.units import format_bytes, format_seconds

MOST_POINTS = 800
"""Points of a curve; longer ones keep the lowest and the highest of each stretch."""
_LOG_RATIO = 20
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_TICKS = 4
"""Gaps between the ticks of an axis, about."""
_MARGIN = 0.05
"""Share of the height that is free above and below a curve."""

_LARGEST = 1e300
"""The ends of an axis at most, whose length is finite; values beyond them are outside the plot."""
_LARGEST_EXPONENT = 307
"""Of a power of ten that a float holds five times."""

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    kind: str
    """Its class in the style sheet, such as `train`, `eval` or `planned`."""
    points: str
    """For a polyline: x and y in percent, y from the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A value on an axis, or a mark."""

    at: float
    """Its place in percent, from the left or from the top."""
    text: str
    kind: str = ""
    """Its class in the style sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over the same steps."""

    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Tick, ...]
    """Steps with something to tell."""
    is_logarithmic: bool


def plot(
    curves: Sequence[tuple[str, Pairs]],
    *,
    form: Callable[[float], str],
    marks: Sequence[tuple[float, str, str]] = (),
    from_zero: bool = False,
) -> Plot | None:
    """Returns the plot of curves, each a class with (step, value), or None without a point.

    `marks` are (step, class, text). The axis begins at 0 `from_zero`; else it is logarithmic if positive values span
    more than a factor of 20.

    >>> found = plot([("train", [(1, 2.0), (3, 1.0)])], form=str, marks=[(2, "warning", "spike")])
    >>> found.lines[0].points, found.marks[0].at
    ('0.00,4.55 100.00,95.45', 50.0)
    """
    values = [value for _, pairs in curves for _, value in pairs]
    if not values:
        return None
    steps = [step for _, pairs in curves for step, _ in pairs]
    # a single step would have no width
    first, last = min(steps), max(max(steps), min(steps) + 1)
    scale, low, high = _bounds(values, from_zero=from_zero)

    def x(step: float) -> float:
        return 100 * (step - first) / (last - first)

    def y(value: float) -> float:
        return 100 * (high - scale(value)) / (high - low)

    def place(pair: tuple[float, float]) -> str:
        return f"{x(pair[0]):.2f},{y(pair[1]):.2f}"

    ticks = _decades(low, high) if scale is math.log10 else _round_values(low, high)
    return Plot(
        lines=tuple(Line(kind=kind, points=" ".join(map(place, thinned(pairs)))) for kind, pairs in curves),
        x_ticks=tuple(Tick(at=x(step), text=f"{step:,.0f}") for step in _round_values(first, last) if step % 1 == 0),
        y_ticks=tuple(Tick(at=y(value), text=form(value)) for value in ticks),
        marks=tuple(Tick(at=x(step), text=text, kind=kind) for step, kind, text in marks if first <= step <= last),
        is_logarithmic=scale is math.log10,
    )


def _bounds(values: Sequence[float], *, from_zero: bool) -> tuple[Callable[[float], float], float, float]:
    """Returns the scale of an axis, `math.log10` or `float`, and its ends on it."""
    is_logarithmic = not from_zero and min(values) > 0 and max(values) / min(values) > _LOG_RATIO
    scale: Callable[[float], float] = math.log10 if is_logarithmic else float
    low, high = (max(-_LARGEST, min(scale(value), _LARGEST)) for value in (min(values), max(values)))
    margin = _MARGIN * (high - low) or max(abs(high) * _MARGIN, 1e-9)
    return scale, 0.0 if from_zero else low - margin, high + margin


def thinned(pairs: Pairs) -> Pairs:
    """Returns at most about `MOST_POINTS` of the points, the lowest and the highest of each stretch among them.

    >>> len(thinned([(step, step % 7) for step in range(10_000)])) <= MOST_POINTS
    True
    """
    if len(pairs) <= MOST_POINTS:
        return [*pairs, *pairs] if len(pairs) == 1 else pairs  # a line of no length is drawn as a dot
    size = math.ceil(2 * len(pairs) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(pairs), size):
        stretch = pairs[at : at + size]
        ends = {min(stretch, key=lambda pair: pair[1]), max(stretch, key=lambda pair: pair[1])}
        kept += sorted(ends)
    return kept


def _round_values(low: float, high: float) -> list[float]:
    """Returns round values between two bounds, about as many as an axis has ticks.

    >>> _round_values(0.13, 1.9)
    [0.5, 1.0, 1.5]
    """
    raw = (high - low) / _TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Returns powers of ten between two exponents, and twice and five times them if they are few.

    >>> _decades(-0.5, 1.1), _decades(0, 40)
    ([0.5, 1.0, 2.0, 5.0, 10.0], [1.0, 10000000000.0, 1e+20, 1e+30, 1e+40])
    """
    stride = max(1, math.ceil((high - low) / (2 * _TICKS)) if high - low < 3 * _TICKS else round((high - low) / _TICKS))
    exponents = range(math.floor(low), min(math.ceil(high), _LARGEST_EXPONENT) + 1, stride)
    factors = (1,) if high - low > 3 else (1, 2, 5)
    values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [value for value in values if low <= math.log10(value) <= high]


LEGEND = ("0", "< ¼", "¼ – ½", "½ – 0.8", "0.8 – 1.25", "1.25 – 2", "2 – 4", "> 4")
"""Loads of each shade of `expert_balance`."""
_MOST_TICKS = 8
_ROW_REM = 0.75
"""Height of a row, if that keeps the map between these two heights."""
_LEAST_REM, _MOST_REM = 3.0, 30.0


def heat_map(loads: LoadMap) -> dict[str, Any]:
    """Returns the picture of a map, a row for each layer with experts, its axes, and the same in words.

    A path has a color, as an index of `LEGEND`, and the path of an SVG that fills all of its cells.

    >>> found = heat_map(LoadMap(step=8, layers=(1, 2), loads=((1.0, 1.1), (2.5, 0.0))))
    >>> found["paths"]
    ((0, 'M1 1h1v1h-1z'), (4, 'M0 0h2v1h-2z'), (6, 'M0 1h1v1h-1z'))
    """
    paths: dict[int, list[str]] = {}
    # one path for each color and one piece for each run of equal cells: thousands of experts stay a small page
    for row, of_layer in enumerate(loads.loads):
        start = 0
        for color, cells in groupby(map(shade, of_layer)):
            count = sum(1 for _ in cells)
            paths.setdefault(color, []).append(f"M{start} {row}h{count}v1h-{count}z")
            start += count
    width, height = max(map(len, loads.loads)), len(loads.loads)
    return {
        "width": width,
        "height": height,
        "height_rem": min(max(_ROW_REM * height, _LEAST_REM), _MOST_REM),
        "paths": tuple((color, "".join(parts)) for color, parts in sorted(paths.items())),
        "x_ticks": _ticks(range(width)),
        "y_ticks": _ticks(loads.layers),
        "text": loads.text,
        "columns": COLUMNS,
        "rows": loads.rows,
    }


def _ticks(numbers: Sequence[int]) -> tuple[Tick, ...]:
    """Returns the numbers of some cells, at their middle."""
    step = 1
    while len(numbers) > step * _MOST_TICKS:
        step *= 2
    return tuple(Tick(at=100 * (at + 0.5) / len(numbers), text=str(numbers[at])) for at in range(0, len(numbers), step))


MOST_RANKS = 16
"""Ranks with a bar of their own; of more, those with the largest bars."""
_PARTS = (Part.PARAMS, Part.GRADS, Part.OPTIMIZER, Part.TRANSIENT)
"""Parts of a bar of memory."""
_STEP_COLORS: Mapping[str, str] = {
    Part.COMPUTATION: "p0",
    Part.TRAINING: "p0",
    Part.COMMUNICATION: "p2",
    Part.SLOWER_RANKS: "p4",
    Part.DATA_WAIT: "p5",
    Part.HOST: "p1",
    Part.OTHER: "p3",
}
"""Parts of a bar of time; computation has one of two names."""
# fmt: off
CHINESE: Mapping[str, str] = {
    **PLAN_CHINESE,
    Quantity.STEP_S: "每步时间", Quantity.TOKENS: "每 GPU token/s", Quantity.MFU: "MFU",
    Quantity.PEAK: "每 GPU 张量峰值", Quantity.RESERVED: "每 GPU PyTorch 占用", Quantity.STATES: "每 GPU 模型状态",
    Quantity.HOST: "每 rank 卸载的状态",
    Quantity.COMM: "等待集合通信", Quantity.BUS: "总线带宽",
    Part.COMPUTATION: "计算", Part.COMMUNICATION: "未被掩盖的通信", Part.SLOWER_RANKS: "等待较慢的 rank",
    Part.DATA_WAIT: "等待数据", Part.HOST: "等待主机", Part.OTHER: "步与步之间",
    Part.TRAINING: "计算与通信", Part.PARAMS: "参数", Part.GRADS: "梯度",
    Part.OPTIMIZER: "优化器状态", Part.TRANSIENT: "激活、logits 与缓冲区",
    Held.PARAMS: "参数", Held.GRADS: "梯度", Held.OPTIMIZER: "优化器状态", Held.OTHER: "激活、logits 与缓冲区",
    Held.CACHED: "PyTorch 缓存", Held.OUTSIDE: "PyTorch 之外", text.TOTAL: "合计",
    **dict(zip(COLUMNS, ("层", "标准差 / 平均", "最忙 / 平均", "最忙专家", "多样性", "无 token 的专家"), strict=True)),
    Stage.STARTING: "启动中", Stage.RUNNING: "训练中", Stage.ENDED: "已结束", Stage.SAVED: "已保存并退出",
    Stage.FAILED: "失败", Stage.STOPPED: "已停止", GONE: "进程消失", UNKNOWN: "状态未知",
}
"""Names in a report → the same in Chinese."""
# fmt: on


def page(reports: Sequence[Report]) -> str:
    """Returns the page of one run, or of several with what differs between them first."""
    data = {
        "version": __version__,
        "title": ", ".join(one.recorded.run_dir.path.name for one in reports),
        "table": text.side_by_side(reports) if len(reports) > 1 else [],
        "runs": [_run(one) for one in reports],
        "chinese": {str(key): name for key, name in CHINESE.items()},
        "colors": {str(part): color for part, color in zip(_PARTS, ("p0", "p1", "p2", "p5"), strict=True)},
        "step_colors": _STEP_COLORS,
        "heat_legend": LEGEND,
    }
    return render("report", data)


def _run(report: Report) -> dict[str, Any]:
    """Returns all that the page shows of one run."""
    recorded = report.recorded
    estimate, script = recorded.estimate, recorded.run_dir.start_script
    bars, warm_up = list(islice(_bars(report), MOST_RANKS + 1)), counted(recorded.windows).warm_up_steps
    return {
        "name": shown(str(recorded.run_dir.path)),
        "stage": report.stage,
        "is_good": report.is_good,
        "verdict": text.verdict(report),
        "failure": recorded.failure or "",
        "tiles": list(_tiles(report)),
        "rows": [
            [*_names(report, one.quantity), figure(one.quantity, one.planned), measured_text(one), off_text(one)]
            for one in report.comparisons
        ],
        "differs": _difference(report),
        "oom": _out_of_memory(report),
        "checks": recorded.preflight.checks if recorded.preflight else (),
        "first": text.first_text(report),
        "step": {"bars": [*_step_bars(report)], "parts": [str(one.part) for one in report.parts], "warm_up": warm_up},
        "traffic": text.traffic_text(report) if report.traffic else "",
        "plots": [asdict(each) | names for each, names in _plots(report)],
        "experts": heat_map(recorded.experts) if recorded.experts is not None else None,
        "bars": bars,
        "legend": [part for index, part in enumerate(_PARTS) if any(bar["shares"][index] for bar in bars)],
        "left_out_ranks": max(0, len(recorded.states) - MOST_RANKS),
        "marks": [asdict(mark) for mark in report.marks],
        "loss": text.loss_text(report) if report.losses else "",
        "throughput": text.throughput_text(report) if report.quarters else "",
        "restarts": [*map(text.restart_text, report.restarts), *map(text.adapted_text, recorded.adaptations)],
        **{name: list(getattr(report, name)) for name in ("checkpoints", "damaged", "missing")},
        "final": shown(str(recorded.summary["final"])) if recorded.summary.get("final") else "",
        "edits": None if recorded.edits is None else [text.edit_text(edit) for edit in recorded.edits],
        "advisories": None if report.advisories is None else [asdict(one) for one in report.advisories],
        "machines": text.machines_text(report),
        "plan": label(estimate.configuration) if estimate is not None else "",
        "versions": dict(recorded.versions),
        "command": f"bash {shown(str(script))}" if script.exists() else "",
    }


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yields the figures that come first: the English and the Chinese name, and the value."""
    yield "steps", "步数", f"{report.step:,}" + (f" / {report.total_steps:,}" if report.total_steps else "")
    if report.seconds is not None:
        yield "time", "用时", format_seconds(report.seconds)
    if report.losses:
        yield "loss", "loss", f"{report.losses[-1][1]:.4f}"
    if report.evaluations:
        yield "best evaluation", "最好的评估 loss", f"{min(value for _, value in report.evaluations):.4f}"
    for one in report.comparisons:
        if one.quantity in {Quantity.STEP_S, Quantity.TOKENS, Quantity.MFU, Quantity.PEAK} and one.measured is not None:
            off = f" ({100 * one.off:+.0f} %)" if one.off is not None else ""
            yield *_names(report, one.quantity), figure(one.quantity, one.measured) + off


def _names(report: Report, quantity: Quantity) -> tuple[str, str]:
    """Returns the name of a quantity in both languages: per GPU, or per rank for a run on CPUs."""
    name = name_of(quantity, report.recorded.cluster)
    return name, CHINESE[quantity] if name == NAMES[quantity] else CHINESE[quantity].replace("GPU", "rank")


def _out_of_memory(report: Report) -> dict[str, Any] | None:
    record = report.recorded.out_of_memory
    if record is None:
        return None
    command, resumes = text.command_of(report.recorded.state), bool(report.checkpoints)
    return {
        "where": record.where,
        "measured": record.measured.words if record.measured is not None else "",
        "rows": text.memory_rows(record),
        "peak": record.predicted.peak_instant if record.predicted else "",
        "tensors": [text.largest_text(one) for one in record.predicted.largest] if record.predicted else [],
        "blocks": [f"{one.count} × {format_bytes(one.size_bytes)}" for one in record.largest],
        "fixes": [(printable(one.text), one.typed(resumes=resumes, command=command)) for one in record.fixes],
    }


def _difference(report: Report) -> dict[str, str] | None:
    worst = report.largest
    if worst is None:
        return None
    form = format_seconds if worst.is_time else format_bytes
    share = f"{100 * worst.share:+.1f} %"
    return {
        "part": worst.part,
        "measured": form(worst.measured),
        "planned": form(worst.planned) if worst.planned else "",
        "share": share,
    }


def _plots(report: Report) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yields each plot that has a point, with its name in both languages."""
    windows = report.recorded.windows
    marks = [(mark.first_step, mark.severity, mark.rule) for mark in report.marks]
    marks += [(restart.from_step, "restart", "restart") for restart in report.restarts]
    rates = series(windows, "tokens_per_s")
    planned = next((one.planned for one in report.comparisons if one.quantity is Quantity.TOKENS), None)
    ranks = len(report.recorded.peaks) or len(report.recorded.states)
    curves: list[tuple[str, Any]] = [("train", rates)]
    if planned is not None and ranks and rates:
        # planned for a GPU, drawn for all ranks
        curves.append(("planned", [(step, planned * ranks) for step, _ in (rates[0], rates[-1])]))
    losses, norms = [("train", report.losses), ("eval", report.evaluations)], [("train", series(windows, "grad_norm"))]
    loads = [("train", series(windows, "expert_load_cv"))]
    for en, zh, found in (
        ("Loss", "Loss", plot(losses, form=lambda value: f"{value:.4g}", marks=marks)),
        ("Tokens per second of all ranks", "所有 rank 每秒 token 数", plot(curves, form=_rate, from_zero=True)),
        ("Gradient norm", "梯度范数", plot(norms, form=lambda value: f"{value:.3g}", marks=marks)),
        (
            "Load of experts: deviation over mean",
            "专家负载：标准差 / 平均",
            plot(loads, form=lambda value: f"{value:.3g}"),
        ),
    ):
        if found is not None:
            yield found, {"en": en, "zh": zh}


def _rate(value: float) -> str:
    return f"{value:,.0f}"


def _step_bars(report: Report) -> Iterator[dict[str, Any]]:
    """Yields the bars of the planned step, if its time is planned, and of a measured one, both on one scale."""
    planned = [one.planned for one in report.parts]
    bars = [("plan", "方案", [seconds or 0.0 for seconds in planned])] if any(planned) else []
    bars += [("run", "运行", [one.measured for one in report.parts])] if report.parts else []
    scale = max((sum(seconds) for _, _, seconds in bars), default=0.0) or 1.0
    for en, zh, seconds in bars:
        shares = [round(100 * each / scale, 2) for each in seconds]
        yield {"en": en, "zh": zh, "total": format_seconds(sum(seconds)), "shares": shares}


def _bars(report: Report) -> Iterator[dict[str, Any]]:
    """Yields the bars of the plan and of each measured rank, the fullest first; all on one scale."""
    recorded = report.recorded
    estimate, peaks = recorded.estimate, recorded.peaks
    has_peaks = len(peaks) == len(recorded.states) > 0
    bars = []
    if estimate is not None and recorded.states:
        states, live = estimate.memory.states, estimate.memory.live_bytes_per_gpu
        held = (states.params, states.grads, states.optimizer)
        bars.append(("plan", "方案", (*held, live - sum(held) if has_peaks else 0)))
    ranks = []
    for number, rank in enumerate(recorded.states):
        held = (rank["params"], rank["grads"], rank["optimizer"])
        rest = round(max(0.0, peaks[number] - sum(held))) if has_peaks else 0
        ranks.append((f"rank {number}", f"rank {number}", (*held, rest)))
    bars += sorted(ranks, key=lambda each: -sum(each[2]))
    scale = max((sum(sizes) for _, _, sizes in bars), default=0) or 1
    for en, zh, sizes in bars:
        shares = [round(100 * size / scale, 2) for size in sizes]
        yield {"en": en, "zh": zh, "total": format_bytes(sum(sizes)), "shares": shares}
