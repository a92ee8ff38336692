"""Runs a job for some tens of steps to measure it, and ends the run when it is known how fast it is."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from dstrain.choices import Task
from dstrain.errors import DstrainError, Interrupted, SavedAndLeft
from dstrain.facts.this_machine import versions
from dstrain.heartbeat import Phase
from dstrain.job.code_variables import is_secret
from dstrain.job.schema import Job
from dstrain.launch.launch import Launch
from dstrain.launch.nodes.connection import StopRequests
from dstrain.launch.prepare import inputs
from dstrain.launch.prepare.prepare import PreparedRun
from dstrain.launch.run import state
from dstrain.launch.run.control import noting_signals
from dstrain.launch.run.supervisor import Policy, Reporter, Supervisor
from dstrain.launch.timeouts import Timeouts
from dstrain.monitor.metrics import current_steps, read_jsonl
from dstrain.monitor.windows import Measurement, is_slower, measurement
from dstrain.paths import write_atomic
from dstrain.plan.configuration import Configuration
from dstrain.plan.labels import title_parts
from dstrain.records import load_json, to_data, to_json, type_config
from dstrain.rundir import RunDir

LEAST_WINDOWS = 5
"""Steps whose time counts before a run is called slower than another."""
ENDLESS = 1_000_000
"""Steps of the job itself, so that a run is ended before it saves or evaluates anything."""
OVERRIDES = (
    f"max_steps={ENDLESS}",
    f"save_steps={ENDLESS}",
    "save_strategy=steps",
    "eval_strategy=steps",
    "eval_steps=null",
    "eval_on_start=false",
    "load_best=false",
    "early_stopping=null",
    "samples=null",
    "logging_steps=1",
    "resume=never",
    "health={}",
    "monitor={sinks: []}",
)
"""Changes of a trial to a job: it measures every step, and writes only metrics and logs."""


def fewer_samples(job: Job, num_ranks: int, steps: int) -> tuple[str, ...]:
    """Returns an override for a task that computes a reference of all samples before its first step: only as many
    samples as the steps need."""
    if job.task is not Task.DPO:
        return ()
    enough = (steps + 2) * job.samples_per_step(num_ranks)
    return (f"max_samples={min(enough, job.max_samples or enough)}",)


class Ending(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    SLOWER = "slower"
    """Ended before its last step, since it is slower than another."""
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    NO_TIME = "no time left"


KEPT = frozenset({Ending.MEASURED, Ending.SLOWER, Ending.OUT_OF_MEMORY})
"""Endings that another run would repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Measurements of a short run."""

    __pydantic_config__ = type_config

    ending: Ending
    key: str
    """Digest of all that decides its speed (`key_of`)."""
    seconds: float
    """How long it took, its start included."""
    start_s: float | None = None
    """How long it took until its first step was logged; None if it logged none."""
    measured: Measurement | None = None
    """None if it logged no step."""
    problem: str | None = None
    """Why it failed."""

    @property
    def step_s(self) -> float | None:
        """The median seconds of a step; None if it failed, or if too few steps were measured."""
        if self.measured is None or self.ending in (Ending.FAILED, Ending.OUT_OF_MEMORY):
            return None
        return self.measured.step_s if self.measured.windows >= LEAST_WINDOWS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a trial ends."""

    steps: int
    """Steps to measure; those that warm up come on top, up to as many and one."""
    until: float
    """The end of the budget, by `time.monotonic`."""
    best: Sequence[Mapping[str, Any]] = ()
    """The logged steps of the fastest run so far; none for the first one."""


def key_of(prepared: PreparedRun, steps: int) -> str:
    """Returns a digest of all that decides how fast a job trains: the job, its configuration, machines and releases."""
    job = to_data(prepared.job)
    for name in ("output_dir", "ds_config", "hostfile"):
        del job[name]
    job["env"] = {name: value for name, value in prepared.job.env.items() if not is_secret(name, value)}
    cluster = to_data(prepared.cluster)
    parts = {"job": job, "ds_config": prepared.ds_config, "cluster": cluster, "versions": versions(), "steps": steps}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def earlier(run_dir: RunDir, key: str) -> Trial | None:
    """Returns the trial that was run before in a folder, if another run would repeat it; None otherwise."""
    with suppress(DstrainError):
        trial: Trial = load_json(Trial, run_dir.trial)
        return trial if trial.key == key and trial.ending in KEPT else None
    return None


def logged(run_dir: RunDir) -> list[dict[str, Any]]:
    """Returns the logged steps of a trial."""
    return [line for line in current_steps(read_jsonl(run_dir.metrics)) if line.get("step_s")]


def judged(lines: Sequence[Mapping[str, Any]], limits: Limits, now: float) -> Ending | None:
    """Returns how a run with these logged steps ends now; None if it goes on."""
    run, best = measurement(lines), measurement(limits.best[: len(lines)])
    if run.windows >= limits.steps or len(lines) > 2 * limits.steps:
        return Ending.MEASURED
    if run.windows >= LEAST_WINDOWS and best.windows >= LEAST_WINDOWS and is_slower(run, best):
        return Ending.SLOWER
    return Ending.NO_TIME if now >= limits.until else None


@dataclass(slots=True)
class _Watch:
    """Ends a run through its stop requests as soon as it is judged."""

    run_dir: RunDir
    limits: Limits
    requests: StopRequests
    tell: Callable[[Phase, int | None, int], None]
    began: float = field(default_factory=time.monotonic)
    start_s: float | None = None
    ending: Ending | None = None

    def tick(self, phase: Phase, done: int | None, total: int) -> None:
        """Looks at the logged steps."""
        lines, steps = logged(self.run_dir), self.limits.steps + 1
        if lines and self.start_s is None:
            self.start_s = time.monotonic() - self.began
        is_step = phase is Phase.STEP
        self.tell(phase, min(len(lines), steps) if is_step else done, steps if is_step else total)
        if self.ending is None and not self.requests.stop:
            self.ending = judged(lines, self.limits, time.monotonic())
            if self.ending is not None:
                self.requests.stop.append(f"dstrain tune: {self.ending}")


def run_trial(
    launch: Launch, limits: Limits, *, timeouts: Timeouts, tell: Callable[[Phase, int | None, int], None]
) -> Trial:
    """Runs a launch until it is judged, in an emptied run directory, and returns what it measured.

    A run that fails is a result. Raises the error of a run that somebody else ended, of which nothing is recorded, and
    Interrupted if somebody wanted to end one that was ending already.
    """
    run_dir, key = launch.prepared.run_dir, key_of(launch.prepared, limits.steps)
    state.refuse_living(run_dir)
    shutil.rmtree(run_dir.path, ignore_errors=True)
    inputs.check_run_dir(run_dir, resume="never")
    with state.only_one(run_dir), noting_signals(state.run_log(run_dir)) as requests:
        watch = _Watch(run_dir, limits, requests, tell)
        reporter = Reporter(say=lambda text: None, pass_on=lambda text: None, progress=watch.tick)
        error: DstrainError | None = None
        try:
            Supervisor(lambda *_: launch, requests, Policy(timeouts=timeouts), reporter, None).drive(launch)
        except DstrainError as raised:
            error = raised
        # the watch ends a run by the same requests as a person: its ending tells whose they are
        if watch.ending is None and (isinstance(error, Interrupted | SavedAndLeft) or requests.stop):
            assert error is not None
            raise error
    trial = _trial(run_dir, watch, error)
    trial = replace(trial, key=key, seconds=time.monotonic() - watch.began)
    write_atomic(run_dir.trial, to_json(trial))
    if len(requests.stop) > 1:
        raise Interrupted(f"stopped ({requests.stop[-1]}); no rank is left running")
    return trial


def _trial(run_dir: RunDir, watch: _Watch, error: DstrainError | None) -> Trial:
    lines = logged(run_dir)
    ending, problem = watch.ending, None
    if ending is None and error is not None:
        ending = Ending.OUT_OF_MEMORY if run_dir.oom.exists() else Ending.FAILED
        problem = error.problem
    return Trial(
        ending=ending or Ending.MEASURED,
        key="",
        seconds=0.0,
        start_s=watch.start_s,
        measured=measurement(lines) if lines else None,
        problem=problem,
    )


def title_of(c: Configuration) -> str:
    """Returns the choices of a configuration in a few words.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> title_of(changed(DEFAULTS, zero_stage=3, sp=2, grad_accum=4))
    'ZeRO-3, SP 2, micro-batch 1 × 4'
    """
    parts = title_parts(c)
    degrees = [f"{name} {degree}" for name, degree in (("SP", c.parallel.sp), ("hpZ", c.zero.hpz)) if degree > 1]
    return ", ".join([*parts[:-1], *degrees, f"{parts[-1]} × {c.step.grad_accum}"])


def folder_of(run_dir: RunDir, c: Configuration) -> Path:
    """Returns the run directory of a trial below its job's, named after its choices.

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> folder_of(RunDir(Path("/out")), changed(DEFAULTS, zero_stage=2, micro_batch=4))
    PosixPath('/out/tune/zero-2-micro-batch-4-1')
    """
    letters = "".join(letter if letter.isalnum() else " " for letter in title_of(c).lower())
    return run_dir.tune / "-".join(letters.split())
