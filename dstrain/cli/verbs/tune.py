"""`dstrain tune`: measures the plan's best configurations in short runs, and writes the fastest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from dstrain.cli import calibrate
from dstrain.cli.console import answer, answer_json, say, say_lines
from dstrain.cli.options.data_lengths import planned_steps
from dstrain.cli.options.typed import TRUST
from dstrain.cli.output.progress import Screen
from dstrain.cli.output.tune import (
    Candidate,
    Options,
    Row,
    candidate_of,
    compiled_candidate,
    document,
    dry_lines,
    in_turn,
    launch_at,
    ready,
    run_options,
    table,
    told,
    winner,
)
from dstrain.cli.verbs import run
from dstrain.config.edits.other_choices import (
    OPEN,
    JobFiles,
    job_files,
    settled_choices,
    write,
)
from dstrain.errors import DstrainError, InvalidConfig, RunFailed
from dstrain.facts.cluster.machines import hosts_of
from dstrain.facts.this_machine import busy_share
from dstrain.facts.workload import Workload
from dstrain.job.file import read_job
from dstrain.launch.prepare.job_context import open_request
from dstrain.launch.prepare.prepare import PreparedRun
from dstrain.launch.run import state
from dstrain.launch.run import trial as trials
from dstrain.paths import shown
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.named_parts import unplanned_parts
from dstrain.plan.search.alternatives import contenders
from dstrain.rundir import run_line
from dstrain.units import counted

BUSY = 0.1
"""Share of the cores from which other processes are worth a note before ranks train on them."""


@click.command("tune")
@click.argument("job", type=click.Path(path_type=Path), default="job.yaml")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="MINUTES",
    help="Minutes for all runs together, their starts included.",
)
@click.option("--steps", type=click.IntRange(10), default=20, show_default=True, help="Steps to measure in each run.")
@click.option(
    "--candidates", type=click.IntRange(2), default=5, show_default=True, help="Configurations to measure at most."
)
@TRUST
@click.option("--no-doctor", is_flag=True, help="Skip the check of this machine before the first run.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would run and how long by the plan; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON to stdout.")
def command(**typed: Any) -> None:
    """Measure the configurations that the plan ranks first, and write the fastest one into the job's files.

    The present configuration runs first, then the best ones by the plan that differ in kind: ZeRO stage, offload,
    recomputation, sequence parallelism, micro-batch. All have the same global batch. Each trains some steps on the real
    ranks in a folder of its own, OUTPUT_DIR/tune/…, without checkpoints, evaluation and sinks. A run that is slower
    than the fastest one by more than the noise of both ends early; one that fails is a result. Last comes the fastest
    one with layers that torch.compile compiles; it wins if its steps save more than compiling takes.

    Options that you gave to gen-config and edits by hand stay. Typed again, it continues: measurements of the same
    job, machines and releases are reused. On GPUs, they calibrate the next plans.

    \b
    Example:
      dstrain tune
      dstrain tune job.yaml --budget 15 --candidates 5
    """
    _tune(Options(**typed))


def _tune(options: Options) -> None:
    """Carries out the command."""
    file = read_job(options.job)
    options = replace(options, overrides=trials.fewer_samples(file.job, hosts_of(file).num_slots, options.steps))
    present = run.launch_of(run_options(options), run.allocated(run_options(options)))
    prepared, files = present.prepared, job_files(options.job, Path(present.prepared.job.ds_config))
    workload, estimate = _planned(prepared)
    settled = settled_choices(files)
    say_lines(_before_lines(options, prepared, settled))
    asked = open_request(prepared.job, estimate.configuration, prepared.hosts.num_slots, frozenset(OPEN) - settled)
    estimates = contenders(workload, asked, estimate, options.candidates)
    make = partial(candidate_of, options, files, workload, prepared.run_dir)
    # the present one first: others end early once they are slower than it
    candidates = [ready(options, launch_at(options, estimate, prepared.run_dir), None, is_present=True)]
    candidates += [make(each) for each in estimates[1:]]
    if "torch_compile" not in settled and (last := compiled_candidate(workload, make, estimate)) is not None:
        candidates.append(last)
    if options.dry_run:
        rows = [candidate.row for candidate in candidates]
        answer_json(document(rows)) if options.as_json else answer("\n".join(dry_lines(rows, options.steps)))
        return
    state.refuse_living(prepared.run_dir)
    if not options.no_doctor:
        run.examine(present)
    if prepared.on_cpu and (busy := busy_share()) > BUSY:
        used = f"other processes use {100 * busy:.0f} % of the cores"
        say_lines([f"note     {used}: if that changes, so does the order of runs"])
    steps = partial(planned_steps, file.job, workload, estimate)
    rows, error = _measured(options, candidates, partial(in_turn, workload, make, steps))
    answer_json(document(rows)) if options.as_json else answer("\n".join(table(rows)))
    # before an error is raised: runs that ended tell as much
    _calibrate(candidates, rows)
    if error is not None:
        say("what was measured is kept; to go on, type the same command again")
        raise error
    _write(files, workload, candidates, rows)


def _planned(prepared: PreparedRun) -> tuple[Workload, Estimate]:
    """Returns the planner's facts of a job, and its estimate. Raises InvalidConfig without them."""
    workload = prepared.workload
    if workload is None or prepared.estimate is None:
        reason = workload and unplanned_parts(prepared.job, workload.model)
        reason = reason or "the model is unknown to the planner: no estimate"
        raise InvalidConfig(f"{reason}, so there is nothing to compare", hint="dstrain run trains it as it is.")
    return workload, prepared.estimate


def _before_lines(options: Options, prepared: PreparedRun, settled: frozenset[str]) -> Iterator[str]:
    most = counted(options.candidates, "configuration")
    yield f"tune     {counted(options.steps, 'step')} of up to {most}, {options.budget:g} min at most"
    yield f"into     {shown(str(prepared.run_dir.tune))}"
    if settled:
        yield f"fixed    {', '.join(sorted(settled))}: given to gen-config, or edited by hand"


def _measured(
    options: Options, candidates: list[Candidate], rebatched: Callable[[Candidate, Sequence[Row]], Candidate]
) -> tuple[list[Row], DstrainError | None]:
    """Runs one configuration after the other; returns what came of them, and the error by which somebody ended it.

    `candidates` are replaced by what `rebatched` makes of them.
    """
    until, timeouts = time.monotonic() + 60 * options.budget, run.time_limits(run_options(options))
    rows: list[Row] = []
    ended: DstrainError | None = None
    for number in range(1, len(candidates) + 1):
        candidate = candidates[number - 1] = rebatched(candidates[number - 1], rows)
        row = candidate.row
        if row.trial is None and candidate.launch is not None and ended is None and _has_time(rows, until):
            say(f"{number} of {len(candidates)}   {row.title}")
            limits = trials.Limits(steps=options.steps, until=until, best=_fastest_steps(candidates, rows))
            try:
                with Screen() as screen:
                    trial = trials.run_trial(candidate.launch, limits, timeouts=timeouts, tell=screen.progress)
                row = replace(row, trial=trial)
                say(f"         {told(row)}")
            except DstrainError as error:  # a run that fails raises none
                ended = error
        rows.append(row)
    untried = [row.title for row in rows if row.trial is None]
    if untried and ended is None:
        say_lines([f"no time for {'; '.join(untried)}: type a longer --budget to go on"])
    return rows, ended


def _has_time(rows: Sequence[Row], until: float) -> bool:
    """Returns whether another run has time for more than its start."""
    starts = [row.trial.start_s for row in rows if row.trial is not None and row.trial.start_s is not None]
    return time.monotonic() + min(starts, default=0.0) < until


def _fastest_steps(candidates: Sequence[Candidate], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the logged steps of the fastest run so far."""
    timed = [
        (row.step_s, candidate) for row, candidate in zip(rows, candidates, strict=False) if row.step_s is not None
    ]
    if not timed:
        return []
    launch = min(timed, key=lambda pair: pair[0])[1].launch
    return trials.logged(launch.prepared.run_dir) if launch is not None else []


def _calibrate(candidates: Sequence[Candidate], rows: Sequence[Row]) -> None:
    """Keeps what was measured now as calibration, or says why not."""
    runs = [
        candidate.launch.prepared
        for candidate, row in zip(candidates, rows, strict=True)
        if candidate.launch is not None and row.step_s is not None and not row.is_earlier and not row.is_compiled
    ]
    if not runs:
        return
    if runs[0].on_cpu:
        say("not kept as calibration: the plan predicts no time for a CPU")
        return
    try:
        if calibrate.keep([prepared.run_dir.path for prepared in runs]):
            say_lines(["kept as calibration: the next plans read it"])
    except InvalidConfig as error:
        say_lines([f"not kept as calibration: {error.parts[0].problem if error.parts else error.problem}"])


def _write(files: JobFiles, workload: Workload, candidates: Sequence[Candidate], rows: Sequence[Row]) -> None:
    """Writes the fastest configuration, unless it is the present one. Raises RunFailed if none was measured."""
    best = winner(rows)
    if best is None:
        raise RunFailed("no configuration was measured", hint="A longer --budget, or the logs in the folders above.")
    chosen = next(candidate.chosen for candidate, row in zip(candidates, rows, strict=True) if row is best)
    if chosen is None:
        say("the present configuration stays")
    else:
        changed = write(files, chosen, workload)
        say_lines([f"wrote {', '.join(shown(str(path)) for path in changed)}: {best.title}"])
    say(f"next: {run_line(files.paths['job.yaml'])}")
