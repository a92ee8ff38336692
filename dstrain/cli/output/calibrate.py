"""Prints a calibration: constants before and after, and what plans of the same runs say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dstrain.monitor.observed_run import ObservedRun
from dstrain.plan.calibration.fit import Compared, Fit
from dstrain.plan.calibration.next_run import NextRun, next_run
from dstrain.plan.calibration.observed import Observed
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.search_space import global_batch
from dstrain.records import to_data
from dstrain.units import format_bytes, format_seconds
from dstrain.wrapping import wrapped


def text(fits: Sequence[Fit], runs: Sequence[ObservedRun]) -> str:
    """Returns the text for people."""
    lines: list[str] = []
    for one in fits:
        own = [run for run in runs if run.observed.workload.cluster.gpu.name == one.gpu]
        lines += [*_constants(one), "", *_plans([one.compared(run.observed) for run in own])]
        lines += [wrapped(f"left out of {run.observed.name}: {reason}") for run in own for reason in run.left_out]
        advice = next_run(_own(runs, one), one)
        lines += [] if advice is None else ["", wrapped(_next(advice))]
    return "\n".join(lines)


def _constants(one: Fit) -> Iterator[str]:
    """Yields the table of one GPU's constants, then those that stay by reason."""
    if one.changed:
        rows = [(one.gpu, "plans use", "runs say", "")]
        for item in one.changed:
            assert item.new is not None
            span = "" if item.error_ratio is None else f"± {item.error_ratio:.0%}"
            rows.append((item.name, _value(item.name, item.old), _value(item.name, item.new), span))
        yield from _aligned(rows)
    else:
        yield f"{one.gpu}: no constant changes"
    reasons: dict[str, list[str]] = {}
    for item in one.constants:
        if item.kept is not None:
            reasons.setdefault(item.kept, []).append(item.name)
    for reason, names in reasons.items():
        yield wrapped(f"stays    {', '.join(names)}: {reason}")


def _plans(compared: Sequence[Compared]) -> Iterator[str]:
    """Yields the table of the runs: measured, and the plan before and after."""
    rows: list[tuple[str, ...]] = [("", "step", "planned", "next plan", "memory", "planned", "next plan")]
    for item in compared:
        measured_s, measured_bytes = item.run.step_s, _device_bytes(item.run)
        rows.append(
            (
                item.run.name,
                "-" if measured_s is None else format_seconds(measured_s),
                *(_seconds(estimate, measured_s) for estimate in (item.before, item.after)),
                "-" if measured_bytes is None else format_bytes(measured_bytes),
                *(_bytes(estimate, measured_bytes) for estimate in (item.before, item.after)),
            )
        )
    yield from _aligned(rows)


def _device_bytes(run: Observed) -> int | None:
    """Returns what a run measured of the GPU's memory."""
    if run.reserved_bytes is None or run.outside_bytes is None:
        return None
    return run.reserved_bytes + run.outside_bytes


def _seconds(estimate: Estimate, measured: float | None) -> str:
    if estimate.speed is None:
        return "-"
    step_s = estimate.speed.step_s
    return format_seconds(step_s) if measured is None else f"{step_s / measured - 1:+.1%}"


def _bytes(estimate: Estimate, measured: int | None) -> str:
    planned = _planned_bytes(estimate)
    return format_bytes(planned) if measured is None else f"{planned / measured - 1:+.1%}"


def _planned_bytes(estimate: Estimate) -> int:
    """Returns what a plan says of the same: the allocator's peak, and what is outside of it."""
    return estimate.memory.reserved_bytes_per_gpu + estimate.memory.breakdown_bytes.context


def _next(advice: NextRun) -> str:
    """Returns the run that tells the most, as options of gen-config, and what it would tell."""
    options, model = " ".join(_options(advice)), advice.run.workload.model.name
    ranges = f"from ± {advice.now:.1%} to ± {advice.after:.1%}"
    return f"next run {model}, as gen-config {options}: it narrows the step times of such runs {ranges}"


def _options(advice: NextRun) -> list[str]:
    c, cluster = advice.run.configuration, advice.run.workload.cluster
    sizes = ["--seq-len", c.batch.seq_len, "--micro-batch", c.batch.micro_batch]
    sizes += ["--global-batch", global_batch(cluster, c), "--zero-stage", c.zero.stage, "--offload", c.zero.offload]
    return [*map(str, sizes), "--grad-ckpt" if c.checkpointing.enabled else "--no-grad-ckpt"]


def _value(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.1f} GB/s"
    return f"{1e6 * value:.1f} µs" if name.endswith("_s") else f"{value:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields rows in columns, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()


def document(fits: Sequence[Fit], runs: Sequence[ObservedRun], path: Path) -> dict[str, Any]:
    """Returns the same as JSON-ready data."""
    return {
        "schema": 1,
        "file": str(path),
        "gpus": {
            one.gpu: {
                "constants": [asdict(item) for item in one.constants],
                "source": one.source,
                "next_run": _advised(next_run(_own(runs, one), one)),
                "runs": [_compared(one.compared(run)) for run in _own(runs, one)],
            }
            for one in fits
        },
        "left_out": {run.observed.name: list(run.left_out) for run in runs if run.left_out},
        "measurements": {run.observed.name: to_data(run.measurement) for run in runs},
    }


def _own(runs: Sequence[ObservedRun], one: Fit) -> list[Observed]:
    """Returns the runs with the GPU of a fit."""
    return [run.observed for run in runs if run.observed.workload.cluster.gpu.name == one.gpu]


def _advised(advice: NextRun | None) -> dict[str, Any] | None:
    if advice is None:
        return None
    model = advice.run.workload.model.name
    return {"model": model, "options": _options(advice), "step_error_now": advice.now, "step_error_after": advice.after}


def _compared(item: Compared) -> dict[str, Any]:
    return {
        "run": item.run.name,
        "step_s": item.run.step_s,
        "planned_step_s": [estimate.speed and estimate.speed.step_s for estimate in (item.before, item.after)],
        "device_bytes": _device_bytes(item.run),
        "planned_device_bytes": [_planned_bytes(estimate) for estimate in (item.before, item.after)],
    }
