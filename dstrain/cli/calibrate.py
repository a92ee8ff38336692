"""`dstrain report --calibrate`: fits the planner's constants to what runs measured, for the next plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dstrain import __version__
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.output.calibrate import document, text
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import calibration
from dstrain.facts.cluster.calibration import Calibration
from dstrain.launch.run.state import folder_of
from dstrain.monitor.observed_run import ObservedRun, read_run
from dstrain.monitor.shared_run import read_shared
from dstrain.paths import shown
from dstrain.plan.calibration.fit import Fit, fit
from dstrain.plan.estimate import assess
from dstrain.units import counted


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
    """Returns what the runs measured. Raises InvalidConfig with the problems of all of them together."""
    runs, problems = [], []
    for path in dict.fromkeys(path.resolve() for path in run_dirs):
        try:
            runs.append(read_shared(path, present) if path.is_file() else read_run(folder_of(path), present))
        except InvalidConfig as error:
            problems.append(error)
    if problems:
        lines = "\n".join(problem.problem for problem in problems)
        raise InvalidConfig(lines, hint=problems[0].hint, parts=problems)
    return [_without_unknown_speed(run) for run in runs]


def _without_unknown_speed(run: ObservedRun) -> ObservedRun:
    """Returns the run without its time if plans predict none for its GPU."""
    observed = run.observed
    if observed.step_s is None or assess(observed.workload, observed.configuration).speed is not None:
        return run
    why = f"its step time: the speed of {observed.workload.cluster.gpu.name} is unknown"
    return replace(run, observed=replace(observed, step_s=None), left_out=(*run.left_out, why))


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
    """Returns what the runs say, by kind of GPU."""
    return [_fit(runs, gpu) for gpu in dict.fromkeys(run.observed.workload.cluster.gpu.name for run in runs)]


def _fit(runs: Sequence[ObservedRun], gpu: str) -> Fit:
    """Returns what the runs with one kind of GPU say."""
    with_gpu = [run for run in runs if run.observed.workload.cluster.gpu.name == gpu]
    own = [run.observed for run in with_gpu]
    sizes = sorted({run.workload.cluster.num_gpus for run in own})
    machines = ", ".join(f"{count} x {gpu}" for count in sizes)
    versions = " or ".join(sorted({run.versions or "unknown releases" for run in with_gpu}))
    day = time.strftime("%Y-%m-%d")
    runs_here = counted(len(own), "run")
    return fit(own, source=f"dstrain report --calibrate {__version__}, {runs_here} on {machines}, {versions}, {day}")
