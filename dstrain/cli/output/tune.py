"""Candidates of `dstrain tune`: prints what will run and what it measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.cli.console import say_lines
from dstrain.cli.verbs import run
from dstrain.config.edits.other_choices import JobFiles, OtherChoices, with_choices
from dstrain.config.remedy import UNADAPTED, Adaptation
from dstrain.errors import InvalidConfig
from dstrain.facts.workload import Workload
from dstrain.launch.launch import Launch
from dstrain.launch.run import trial as trials
from dstrain.launch.run.trial import Ending, Trial, title_of
from dstrain.monitor.windows import is_slower
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.alternatives import with_fastest_batch
from dstrain.plan.search.rules import compiled
from dstrain.records import to_data
from dstrain.rundir import RunDir
from dstrain.units import counted, format_bytes, format_seconds
from dstrain.wrapping import aligned

NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration with what came of it."""

    title: str
    """Its choices in words."""
    estimate: Estimate
    num_gpus: int
    trial: Trial | None
    """None if it was not tried."""
    is_present: bool = False
    """Whether it is the one in the job's files."""
    is_earlier: bool = False
    """Whether it was measured by an earlier `dstrain tune`."""
    base: Row | None = None
    """The same configuration without torch.compile, if that is what it is compared with."""
    planned_steps: int | None = None
    """Optimizer steps of the run that is tuned for; None if that is unknown, or nothing is compiled."""

    @property
    def predicted(self) -> float | None:
        """Tokens per second of all GPUs by the plan, padding included."""
        speed = self.estimate.speed
        return None if speed is None else speed.tokens_per_s_per_gpu * self.num_gpus

    @property
    def tokens_per_s(self) -> float | None:
        """The same as measured, the median."""
        measured = self.trial.measured if self.trial is not None else None
        return None if measured is None else measured.tokens_per_s

    @property
    def peak_bytes(self) -> int | None:
        """Peak of allocated GPU memory, of the rank with most."""
        measured = self.trial.measured if self.trial is not None else None
        peaks = [rank.peak_bytes for rank in measured.ranks if rank.peak_bytes] if measured is not None else []
        return max(peaks, default=None)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, the median; None if too few were measured."""
        return self.trial.step_s if self.trial is not None else None

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile compiles its layers."""
        return self.estimate.configuration.kernels.torch_compile

    @property
    def compile_s(self) -> float | None:
        """How much longer it took to start than its base, the cost of compiling; None if unknown."""
        starts = [row.trial.start_s if row is not None and row.trial is not None else None for row in (self, self.base)]
        own, other = starts
        return max(0.0, own - other) if own is not None and other is not None else None

    @property
    def pays_back_after(self) -> int | None:
        """Steps that save the time of compiling; None if nothing is compiled, or it is no faster beyond the noise."""
        base_s = self.base.step_s if self.base is not None and _is_slower(self.base, self) else None
        if base_s is None or self.step_s is None or self.compile_s is None:
            return None
        return math.ceil(self.compile_s / (base_s - self.step_s))

    @property
    def pays_back(self) -> bool:
        """Whether its steps save more than it costs to compile within the planned run, or nothing is compiled."""
        steps, planned = self.pays_back_after, self.planned_steps
        return self.base is None or (steps is not None and planned is not None and steps < planned)


def winner(rows: Sequence[Row]) -> Row | None:
    """Returns the fastest configuration, the present one if it is as fast within the noise, or None without times.

    One that compiles is left out unless that pays back within the planned run.
    """
    timed = [row for row in rows if row.step_s is not None and row.pays_back]
    if not timed:
        return None
    best = min(timed, key=lambda row: row.step_s or 0.0)
    present = next((row for row in timed if row.is_present), None)
    return present if present is not None and not _is_slower(present, best) else best


def _is_slower(row: Row, best: Row) -> bool:
    one, other = (each.trial.measured if each.trial is not None else None for each in (row, best))
    return one is not None and other is not None and is_slower(one, other)


def verdict(row: Row, best: Row | None, rows: Sequence[Row] = ()) -> str:
    """Returns the result of a configuration, in words."""
    if row.trial is None:
        return "not tried"
    if row.trial.ending is Ending.OUT_OF_MEMORY:
        return "out of memory"
    if row.trial.ending is Ending.FAILED:
        return "failed"
    if row.step_s is None or best is None or best.step_s is None:
        return "no time left to measure it"
    if row is best:
        is_fastest = all(row.step_s <= other.step_s for other in rows if other.step_s is not None and other.pays_back)
        return f"fastest{_compiling(row)}" if is_fastest else "stays: as fast within the noise"
    if row.pays_back_after is not None and not row.pays_back:
        return f"{100 * (row.step_s / best.step_s - 1):+.1f} % time{_compiling(row)}"
    words = f"{100 * (row.step_s / best.step_s - 1):+.1f} % time"
    if not _is_slower(row, best):
        return f"{words}, within the noise"
    measured = row.trial.measured
    is_whole = row.trial.ending is Ending.MEASURED or measured is None
    return words if is_whole or measured is None else f"{words}, by {counted(measured.steps, 'step')}"


def _compiling(row: Row) -> str:
    """Returns the cost of compiling, and the steps of the run that pay it back; empty if none do."""
    if row.compile_s is None or row.pays_back_after is None:
        return ""
    planned = "a run of unknown length" if row.planned_steps is None else f"{row.planned_steps:,}"
    return (
        f"; compiling takes {format_seconds(row.compile_s)}, paid back after {row.pays_back_after:,} steps of {planned}"
    )


def told(row: Row) -> str:
    """Returns the result of a configuration that has just run."""
    assert row.trial is not None
    took = format_seconds(row.trial.seconds)
    if row.step_s is None:
        return f"{verdict(row, None)} ({took}){f': {row.trial.problem}' if row.trial.problem else ''}"
    early = ": slower, ended early" if row.trial.ending is Ending.SLOWER else ""
    compiling = "" if row.compile_s is None else f", {format_seconds(row.compile_s)} of it compiling"
    warm_up = row.trial.measured.warm_up_steps if row.trial.measured is not None else 0
    slow = f"; {warm_up} steps warmed up" if warm_up > 1 else ""
    return f"{format_seconds(row.step_s)} a step, {_rate(row.tokens_per_s)} tokens/s ({took}{compiling}{slow}){early}"


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the table for people."""
    best = winner(rows)
    cells = [("", "predicted", "tokens/s", "a step", "peak", "")]
    cells += [
        (
            f"{'* ' if row.is_present else '  '}{row.title}",
            _rate(row.predicted),
            _rate(row.tokens_per_s if row.step_s is not None else None),
            NONE if row.step_s is None else format_seconds(row.step_s),
            NONE if row.peak_bytes is None else format_bytes(row.peak_bytes),
            f"{verdict(row, best, rows)}{' (measured before)' if row.is_earlier else ''}",
        )
        for row in rows
    ]
    lines = aligned(cells, right=range(1, len(cells[0]) - 1))
    if any(row.is_present for row in rows):
        lines.append("* the present configuration")
    return lines


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def dry_lines(rows: Sequence[Row], steps: int) -> Iterator[str]:
    """Yields the trials, and their time by the plan."""
    for row in rows:
        speed, sign = row.estimate.speed, "* " if row.is_present else "  "
        memory = format_bytes(row.estimate.memory.device_bytes_per_gpu)
        time = NONE if speed is None else format_seconds((steps + 1) * speed.step_s)
        known = "  measured before" if row.is_earlier else ""
        refused = f"  {verdict(row, None)}" if row.trial is not None and row.trial.ending is Ending.FAILED else ""
        yield f"{sign}{row.title}: {time}, {memory} per GPU{known}{refused}"
    to_run = [row for row in rows if row.trial is None]
    times = [row.estimate.speed.step_s * (steps + 1) for row in to_run if row.estimate.speed is not None]
    if not to_run:
        yield "nothing is left to measure"
    elif len(times) < len(to_run):
        yield f"{len(to_run)} runs; the plan predicts no time here, and starts come on top"
    else:
        yield f"{counted(len(to_run), 'run')}: {format_seconds(sum(times))} of steps by the plan; starts come on top"


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the table as JSON."""
    best = winner(rows)
    return {
        "schema": 1,
        "winner": None if best is None else best.title,
        "candidates": [
            {
                "title": row.title,
                "is_present": row.is_present,
                "configuration": to_data(row.estimate)["configuration"],
                "predicted_tokens_per_s": row.predicted,
                "tokens_per_s": row.tokens_per_s,
                "step_s": row.step_s,
                "peak_bytes": row.peak_bytes,
                "verdict": verdict(row, best, rows),
                "was_measured_before": row.is_earlier,
                "compile_s": row.compile_s,
                "pays_back_after_steps": row.pays_back_after,
                "trial": None if row.trial is None else to_data(row.trial),
            }
            for row in rows
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options, by name."""

    job: Path
    budget: float = 30.0
    steps: int = 20
    candidates: int = 5
    no_doctor: bool = False
    dry_run: bool = False
    as_json: bool = False
    overrides: tuple[str, ...] = ()
    """`key=value` by which the runs differ from the job, beside every trial's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration to measure."""

    row: Row
    """Its result; with a trial if it was measured before, or is refused before it starts."""
    chosen: OtherChoices | None
    """Its changes to the files; None for the present one, and one that is refused."""
    launch: Launch | None
    """None for one that is refused."""
    compiles_fastest: bool = False
    """Whether its turn comes with the choices of the fastest of the others."""


def run_options(options: Options, changed: Sequence[str] = ()) -> run.Options:
    """Returns the options of `dstrain run` for a short run."""
    return run.Options(job=options.job, overrides=(*trials.OVERRIDES, *options.overrides, *changed))


def launch_at(options: Options, estimate: Estimate, run_dir: RunDir, adaptation: Adaptation = UNADAPTED) -> Launch:
    """Returns the launch of a configuration, in a folder below the run directory of its job."""
    folder = trials.folder_of(run_dir, estimate.configuration)
    chosen = run_options(options, [f"output_dir={folder}"])
    return run.launch_of(chosen, run.allocated(chosen), adaptation)


def candidate_of(
    options: Options, files: JobFiles, workload: Workload, run_dir: RunDir, estimate: Estimate
) -> Candidate:
    """Returns a configuration that differs from the present one; one that lint or the model refuses has failed."""
    try:
        chosen = with_choices(files, estimate, workload)
        launch = launch_at(options, estimate, run_dir, Adaptation(overrides=chosen.overrides, changes=chosen.changes))
    except InvalidConfig as error:
        say_lines([f"refused  {title_of(estimate.configuration)}: {error.problem}"])
        refused = Trial(ending=trials.Ending.FAILED, key="", seconds=0.0, problem=error.problem)
        title, gpus = title_of(estimate.configuration), workload.cluster.num_gpus
        return Candidate(
            row=Row(title=title, estimate=estimate, num_gpus=gpus, trial=refused), chosen=None, launch=None
        )
    return ready(options, launch, chosen)


def ready(options: Options, launch: Launch, chosen: OtherChoices | None, *, is_present: bool = False) -> Candidate:
    """Returns a configuration that can run, with what was measured before."""
    prepared = launch.prepared
    assert prepared.estimate is not None, "the job has an estimate, and its model and machines are the same"
    known = trials.earlier(prepared.run_dir, trials.key_of(prepared, options.steps))
    row = Row(
        title=title_of(prepared.estimate.configuration),
        estimate=prepared.estimate,
        num_gpus=prepared.cluster.num_gpus,
        trial=known,
        is_present=is_present,
        is_earlier=known is not None,
    )
    return Candidate(row=row, chosen=chosen, launch=launch)


def in_turn(
    workload: Workload,
    make: Callable[[Estimate], Candidate],
    planned_steps: Callable[[], int | None],
    one: Candidate,
    rows: Sequence[Row],
) -> Candidate:
    """Returns a candidate as it is measured after others: with the micro-batch that was the fastest, unless it was
    measured itself, or the fastest of all with compiled layers, beside the steps of the run if they are known."""
    if one.compiles_fastest:
        timed = [row for row in rows if row.step_s is not None]
        if not timed:
            return one
        base = min(timed, key=lambda row: row.step_s or 0.0)
        found = compiled_candidate(workload, make, base.estimate)
        if found is None:
            return one
        return replace(found, row=replace(found.row, base=base, planned_steps=planned_steps()))
    if one.row.trial is not None:
        return one
    measured = [(row.estimate, row.step_s) for row in rows if row.step_s is not None]
    other = with_fastest_batch(workload, one.row.estimate, measured)
    return one if other is one.row.estimate else make(other)


def compiled_candidate(workload: Workload, make: Callable[[Estimate], Candidate], base: Estimate) -> Candidate | None:
    """Returns a configuration with compiled layers; None if they are compiled already, or cannot be."""
    other = compiled(workload, base.configuration)
    return None if other is None else replace(make(assess(workload, other)), compiles_fastest=True)
