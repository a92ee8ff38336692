"""`dstrain report --calibrate`: fits the planner's constants to what runs measured, for the next plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import calibration
from dstrain.facts.cluster.calibration import Calibration
from dstrain.launch.run.state import folder_of
from dstrain.monitor.run_record import read
from dstrain.paths import shown
from dstrain.plan.calibration import Compared, Fit, Observed, fit
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.next_run import NextRun, next_run
from dstrain.plan.search.search_space import global_batch
from dstrain.records import to_data
from dstrain.report.calibration import ObservedRun, observed
from dstrain.report.share import read_shared
from dstrain.units import counted, format_bytes, format_seconds
from dstrain.wrapping import aligned, wrapped


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
        yield from aligned(rows, right=range(1, len(rows[0])))
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
    yield from aligned(rows, right=range(1, len(rows[0])))


def _device_bytes(run: Observed) -> int | None:
    """Returns a run's measurements of the GPU's memory."""
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
    """Returns a plan's figures for the same: the allocator's peak, and the memory outside of it."""
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
        "measurements": {run.observed.name: to_data(run.measurement) for run in runs if run.measurement is not None},
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


def calibrate(run_dirs: Sequence[Path], output: Path | None, *, dry_run: bool, as_json: bool) -> None:
    """Fits the planner's constants to what runs measured, and merges them into the calibration file."""
    present = calibration.read(str(output) if output is not None and output.exists() else None)
    runs = _read(run_dirs, present)
    fits = _fits(runs)
    path = Path(output or calibration.DEFAULT_PATH).expanduser()
    answer_json(document(fits, runs, path)) if as_json else answer(text(fits, runs))
    if not any(one.changed for one in fits):
        say_lines([f"nothing changes in {shown(str(path))}: the runs tell no constant"])
    elif dry_run:
        say_lines([f"nothing was written: --dry-run; without it, the new values go to {shown(str(path))}"])
    else:
        _save(fits, present, path)
        say_lines([f"wrote {shown(str(path))}{'' if output is None else ', which plans do not read there'}"])
        say("next: dstrain plan")


def _read(run_dirs: Sequence[Path], present: Calibration) -> list[ObservedRun]:
    """Returns the measurements of the runs. Raises InvalidConfig with the problems of all of them together."""
    runs, problems = [], []
    for path in dict.fromkeys(path.resolve() for path in run_dirs):
        try:
            runs.append(read_shared(path, present) if path.is_file() else observed(read(folder_of(path)), present))
        except InvalidConfig as error:
            problems.append(error)
    if problems:
        lines = "\n".join(problem.problem for problem in problems)
        raise InvalidConfig(lines, hint=problems[0].hint, parts=problems)
    return [_without_unknown_speed(run) for run in runs]


def _without_unknown_speed(run: ObservedRun) -> ObservedRun:
    """Returns the run without its time if plans predict none for its GPU."""
    known = run.observed
    if known.step_s is None or assess(known.workload, known.configuration).speed is not None:
        return run
    why = f"its step time: the speed of {known.workload.cluster.gpu.name} is unknown"
    return replace(run, observed=replace(known, step_s=None), left_out=(*run.left_out, why))


def keep(run_dirs: Sequence[Path]) -> bool:
    """Merges what runs measured into the calibration that all plans read; returns whether they changed it.

    Raises InvalidConfig with the problems of all runs together, such as that they trained on a CPU.
    """
    present = calibration.read()
    fits = _fits(_read(run_dirs, present))
    _save(fits, present, Path(calibration.DEFAULT_PATH).expanduser())
    return any(one.changed for one in fits)


def _save(fits: Sequence[Fit], present: Calibration, path: Path) -> None:
    for one in fits:
        if one.changed:
            calibration.save(one.gpu, one.applied(present.of(one.gpu)), str(path))


def _fits(runs: Sequence[ObservedRun]) -> list[Fit]:
    """Fits the runs of each kind of GPU."""
    return [_fit(runs, gpu) for gpu in dict.fromkeys(run.observed.workload.cluster.gpu.name for run in runs)]


def _fit(runs: Sequence[ObservedRun], gpu: str) -> Fit:
    """Fits the runs with one kind of GPU."""
    with_gpu = [run for run in runs if run.observed.workload.cluster.gpu.name == gpu]
    own = [run.observed for run in with_gpu]
    sizes = sorted({run.workload.cluster.num_gpus for run in own})
    machines = ", ".join(f"{count} x {gpu}" for count in sizes)
    versions = " or ".join(sorted({run.versions or "unknown releases" for run in with_gpu}))
    day = time.strftime("%Y-%m-%d")
    runs_here = counted(len(own), "run")
    return fit(own, source=f"dstrain report --calibrate {__version__}, {runs_here} on {machines}, {versions}, {day}")
