"""Writes the reports of runs as one HTML page with curves and bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from dstrain import __version__
from dstrain.launch.run.state import GONE, Stage
from dstrain.monitor.comparison import Part, Quantity
from dstrain.monitor.comparison_text import NAMES, figure, measured_text, name_of, off_text
from dstrain.monitor.expert_balance import COLUMNS
from dstrain.monitor.windows import counted, series
from dstrain.oom import Part as Held
from dstrain.paths import shown
from dstrain.plan.labels import label
from dstrain.report import out_of_memory as oom
from dstrain.report import table as report_table
from dstrain.report import text
from dstrain.report.curves import plot
from dstrain.report.heat_map import LEGEND, heat_map
from dstrain.report.html import CHINESE as PLAN_CHINESE
from dstrain.report.html import render
from dstrain.report.report import UNKNOWN, Report
from dstrain.units import format_bytes, format_seconds

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
    Held.CACHED: "PyTorch 缓存", Held.OUTSIDE: "PyTorch 之外", oom.TOTAL: "合计",
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
        "table": report_table.table(reports) if len(reports) > 1 else [],
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
        "experts": asdict(heat_map(recorded.experts)) if recorded.experts is not None else None,
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
    command, resumes = oom.command_of(report.recorded.state), bool(report.checkpoints)
    return {
        "where": record.where,
        "measured": record.measured.words if record.measured is not None else "",
        "rows": oom.rows(record),
        "peak": record.predicted.peak_instant if record.predicted else "",
        "tensors": [oom.largest_text(one) for one in record.predicted.largest] if record.predicted else [],
        "blocks": [f"{one.count} × {format_bytes(one.size_bytes)}" for one in record.largest],
        "fixes": [(oom.change_text(one), one.typed(resumes=resumes, command=command)) for one in record.fixes],
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
