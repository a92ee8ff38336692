"""The configurations that `dstrain tune` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.cli import run
from dstrain.cli.console import say_lines
from dstrain.cli.output.tune import Row
from dstrain.config.edits.other_choices import JobFiles, OtherChoices, with_choices
from dstrain.config.remedy import UNADAPTED, Adaptation
from dstrain.errors import InvalidConfig
from dstrain.facts.workload import Workload
from dstrain.launch.launch import Launch
from dstrain.launch.run import trial as trials
from dstrain.launch.run.trial import Trial, title_of
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.alternatives import with_fastest_batch
from dstrain.plan.search.rules import compiled
from dstrain.rundir import RunDir


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
    """`key=value` by which the runs differ from the job, beside those of every trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration to measure."""

    row: Row
    """What is known of it; with a trial if it was measured before, or is refused before it starts."""
    chosen: OtherChoices | None
    """What it changes in the files; None for the present one, and one that is refused."""
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
