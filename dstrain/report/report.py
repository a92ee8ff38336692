"""The report of a run: how it ended, how far it was from its plan, and what happened on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from dstrain.config import jsonc
from dstrain.config.lint.rule import Subject
from dstrain.config.lint.rules import releases
from dstrain.errors import DstrainError, Place
from dstrain.job.file import JobFile
from dstrain.job.schema import HealthAction
from dstrain.launch.run import state
from dstrain.monitor.comparison import (
    Comparison,
    Difference,
    StepPart,
    comparisons,
    largest_difference,
    middle,
    step_parts,
)
from dstrain.monitor.health.nonfinite import stop_in
from dstrain.monitor.run_record import RunRecord
from dstrain.monitor.traffic import NAMES, Kind, kinds_of
from dstrain.monitor.windows import Line, counted, number, series
from dstrain.records import flat, from_data, to_data
from dstrain.rundir import GONE, LIVING, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstVerdict:
    """Verdict of the last start's first steps on the plan."""

    step: int
    cause: Difference | None
    """The part that differed by more than the range of the plan."""
    setting: str
    """The line to change; empty if there is none."""
    gain: str
    """Its gain."""
    note: str
    """The note if there is no advice."""


def first_verdict(line: Line | None) -> FirstVerdict | None:
    """Returns the verdict of the first steps; None without one that can be read."""
    if line is None:
        return None
    cause, advice = line.get("cause"), line.get("advice")
    change = advice if isinstance(advice, dict) else {}
    try:
        difference = from_data(Difference, cause, locate=lambda place: "/".join(map(str, place))) if cause else None
    except DstrainError:  # of another dstrain
        return None
    texts = [text if isinstance(text, str) else "" for text in (change.get("setting"), change.get("gain"))]
    note = line.get("note")
    return FirstVerdict(
        step=line["step"],
        cause=difference,
        setting=texts[0],
        gain=texts[1],
        note=note if isinstance(note, str) else "",
    )


UNKNOWN = "unknown"
"""Stage of a run that `dstrain run` did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A health rule that was broken."""

    rule: str
    severity: str
    """The highest: `warning` or `critical`."""
    first_step: int
    last_step: int
    count: int
    """How often it was told."""
    message: str
    """Its last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A start after the first one."""

    from_step: int
    cause: str | None
    """Why the start before it ended; None if a person resumed the run."""
    change: str
    """Changes since then; empty if none."""
    time_s: float | None
    """When, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """A known fault of the release of DeepSpeed that trained, with the settings of this run."""

    rule: str
    """Id of its lint rule."""
    problem: str
    effect: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of one run."""

    recorded: RunRecord
    """Files it was made from."""
    stage: str
    """A stage of `dstrain status`, or `unknown`."""
    seconds: float | None
    """Duration so far of the last `dstrain run`."""
    step: int
    """Optimizer steps in the metrics or, at the end, in the summary."""
    total_steps: int | None
    """Steps that the job asks for; None if unknown."""
    comparisons: tuple[Comparison, ...]
    largest: Difference | None
    """The part that differs most from the plan."""
    parts: tuple[StepPart, ...]
    """Parts of a step."""
    traffic: tuple[tuple[Kind, float, float], ...]
    """Kind, bytes and exposed seconds of a step's collectives, most bytes first."""
    first: FirstVerdict | None
    """Verdict of the first steps; None before them."""
    marks: tuple[Mark, ...]
    quarters: tuple[float, ...]
    """Median tokens per second of all GPUs in each quarter of the run."""
    data_wait_share: float | None
    """Median share of time in which ranks wait for data."""
    padding_share: float | None
    restarts: tuple[Restart, ...]
    advisories: tuple[Advised, ...] | None
    """None if the versions or the configuration are unknown."""
    checkpoints: tuple[int, ...]
    """Steps of the complete checkpoints."""
    damaged: tuple[str, ...]
    """Newer checkpoints that are incomplete, and why."""
    missing: tuple[str, ...]
    """Figures that are unknown or not measured, with the reason; each once."""

    @property
    def is_good(self) -> bool:
        """Whether the run ended as it should, or is still training."""
        return self.stage not in {Stage.FAILED.value, GONE}

    @property
    def stopped_by(self) -> str | None:
        """The health rule that ended the run, if one did."""
        stop = stop_in(self.recorded.findings, self.recorded.cause)
        return stop.rule if stop is not None and self.stage == Stage.FAILED.value else None

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of each logged window."""
        return series(self.recorded.windows, "loss")

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Step and evaluation loss of each evaluation."""
        return series(self.recorded.evaluations, "eval_loss")


def report(recorded: RunRecord, *, now: float) -> Report:
    """Returns the report of what a run recorded; `now` is in seconds since the epoch."""
    run, windows = recorded.state, recorded.windows
    is_alive = run is not None and state.is_alive(run, recorded.run_dir)
    last = max((line["step"] for line in (*windows, *recorded.evaluations)), default=0)
    newest = recorded.run_dir.newest_checkpoint()
    advisories = _advisories(recorded)
    return Report(
        recorded=recorded,
        stage=_stage(recorded, is_alive=is_alive),
        # of a run that is gone, the last heartbeat is the end that is known
        seconds=None if run is None else max(0.0, (now if is_alive else run.beat) - run.began),
        step=int(number(recorded.summary.get("steps")) or last),
        total_steps=_total_steps(recorded),
        comparisons=comparisons(recorded),
        largest=largest_difference(recorded),
        parts=step_parts(recorded),
        traffic=tuple(kinds_of({name: middle(windows, name) for name in NAMES})),
        first=first_verdict(recorded.verdict),
        marks=marks(recorded.findings, recorded.cause),
        quarters=quarters([value for _, value in series(counted(windows).windows, "tokens_per_s")]),
        data_wait_share=middle(windows, "data_wait_share"),
        padding_share=middle(windows, "padding_share"),
        restarts=_restarts(recorded),
        advisories=advisories,
        checkpoints=tuple(step for step, _ in recorded.run_dir.whole_checkpoints()),
        # a run that trains may be writing the newest one
        damaged=() if is_alive else newest.skipped,
        missing=(*recorded.unread, *_missing(recorded, advisories)),
    )


def _stage(recorded: RunRecord, *, is_alive: bool) -> str:
    run = recorded.state
    if run is None:
        return Stage.ENDED.value if recorded.summary else UNKNOWN
    return GONE if run.stage in LIVING and not is_alive else run.stage.value


def _total_steps(recorded: RunRecord) -> int | None:
    """Returns the steps of the job: given, or from the share of its epochs that is done."""
    job = recorded.job
    if job is None:
        return None
    if job.max_steps:
        return job.max_steps
    if recorded.summary:
        return int(number(recorded.summary.get("steps")) or 0) or None
    last = recorded.windows[-1] if recorded.windows else {}
    epoch = number(last.get("epoch"))
    return round(last["step"] * job.num_train_epochs / epoch) if epoch else None


def marks(findings: Sequence[Line], cause: str = "") -> tuple[Mark, ...]:
    """Returns the broken rules by weight: the one that `cause` names as the end of the run, then critical ones; those
    of the same weight in the order in which they were first broken.

    >>> lines = [{"rule": "loss_spike", "step": step, "severity": "warning", "message": "…"} for step in (40, 90)]
    >>> [(mark.rule, mark.first_step, mark.last_step, mark.count) for mark in marks(lines)]
    [('loss_spike', 40, 90, 2)]
    """
    by_rule: dict[str, list[Line]] = {}
    for line in findings:
        by_rule.setdefault(line["rule"], []).append(line)
    found = [
        Mark(
            rule=rule,
            severity="critical" if any(line.get("severity") == "critical" for line in lines) else "warning",
            first_step=min(line["step"] for line in lines),
            last_step=max(line["step"] for line in lines),
            count=len(lines),
            message=lines[-1]["message"],
        )
        for rule, lines in by_rule.items()
    ]
    ended = {line["rule"] for line in findings if line.get("action") == HealthAction.STOP and line["rule"] in cause}
    return tuple(sorted(found, key=lambda mark: (mark.rule not in ended, mark.severity != "critical")))


def quarters(values: Sequence[float]) -> tuple[float, ...]:
    """Returns the median of each quarter of a series; of fewer than eight values one median.

    >>> quarters([4, 4, 4, 4, 2, 2, 1, 1]), quarters([3, 5])
    ((4.0, 4.0, 2.0, 1.0), (4.0,))
    """
    if not values:
        return ()
    if len(values) < 8:
        return (float(median(values)),)
    borders = [len(values) * quarter // 4 for quarter in range(5)]
    return tuple(float(median(values[first:last])) for first, last in pairwise(borders))


def _restarts(recorded: RunRecord) -> tuple[Restart, ...]:
    """Returns the starts after the first one: by `dstrain run` with their cause, then by hand."""
    own = [
        Restart(from_step=line["from_step"], cause=line["cause"], change=line["change"], time_s=line["time_s"])
        for line in recorded.restarts
    ]
    by_hand = Counter(recorded.resumes) - Counter(restart.from_step for restart in own)
    hand = [Restart(from_step=step, cause=None, change="", time_s=None) for step in sorted(by_hand.elements())]
    return (*own, *hand)


def _advisories(recorded: RunRecord) -> tuple[Advised, ...] | None:
    """Returns the known faults of the releases that trained, as lint finds them; None if they cannot be looked up."""
    if "deepspeed" not in recorded.versions or recorded.ds_config is None:
        return None
    job = recorded.job
    subject = Subject(
        document=jsonc.read(json.dumps(recorded.ds_config), recorded.run_dir.ds_config.name),
        is_trainers=True,
        versions=recorded.versions,
        job=None if job is None else JobFile(job=job, locate=lambda keys: Place(file="request.json")),
        cluster=recorded.cluster,
        estimate=recorded.estimate,
    )
    return tuple(
        Advised(rule=rule.id, problem=fault.problem, effect=fault.effect, fix=fault.fix)
        for rule in releases.RULES
        for fault in rule.find(subject)
    )


def _missing(recorded: RunRecord, advisories: object) -> list[str]:
    """Returns the figures that a run lacks, and why."""
    estimate, cluster = recorded.estimate, recorded.cluster
    on_cpu = cluster is not None and cluster.gpu.is_cpu
    unchecked = "the checks before the first step were off (preflight: false); they try the heaviest micro-batch"
    found = [unchecked] if recorded.job is not None and not recorded.job.preflight else []
    if estimate is None:
        found.append("no plan was recorded, so nothing is compared with it")
    elif on_cpu:
        found.append("ranks trained on a CPU: no time is planned for it, and PyTorch counts no peak of memory there")
    elif cluster is None:
        found.append("the GPU was not known to the plan, so times and MFU are not compared")
    elif estimate.speed is None:
        found.append(f"the speed of {cluster.gpu.name} is not known, so no time is planned")
    if not recorded.windows:
        found.append("no step was logged")
    if recorded.windows and not recorded.states:
        found.append("model states were not measured: that takes two steps")
    if advisories is None:
        found.append("the versions that trained were not recorded, so known faults of releases were not looked up")
    if recorded.edits is None:
        found.append("hand edits are unknown: the files of the job have no record of what was generated")
    return found


def settings(recorded: RunRecord) -> dict[str, Any]:
    """Returns the settings of a run by dotted key: the job's, and the engine's under `ds_config.`."""
    job = {} if recorded.job is None else to_data(recorded.job)
    return flat({**job, "ds_config": recorded.ds_config or {}})


def differing(reports: Sequence[Report]) -> dict[str, tuple[Any, ...]]:
    """Returns the settings in which runs differ, without the names of their folders: key → value of each run."""
    tables = [settings(one.recorded) for one in reports]
    keys = dict.fromkeys(key for table in tables for key in table)
    values = {key: tuple(table.get(key) for table in tables) for key in keys if key not in _OWN}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


_OWN = frozenset({"output_dir", "resume", "monitor.name"})
"""Settings that are of one run and say nothing about another."""

_RECENT = 50
"""Windows from which the pace is taken: it follows a slowdown, and counts evaluations and checkpoints in between."""
_SILENT_S = 600.0
"""Seconds without a logged step after which a run that `dstrain run` did not start is taken for ended."""


def seconds_left(report: Report) -> float | None:
    """Returns the time until the last step at the recent pace, evaluations and checkpoints included; None if the run
    has ended, or if it is not known, as before the second logged window."""
    windows = report.recorded.windows[-_RECENT:]
    if report.total_steps is None or len(windows) < 2 or report.stage not in {*(one.value for one in LIVING), UNKNOWN}:
        return None
    first, last = (number(window.get("time_s")) for window in (windows[0], windows[-1]))
    done = int(windows[-1]["step"])
    steps = done - int(windows[0]["step"])
    if first is None or last is None or steps <= 0 or last <= first:
        return None
    return max(0, report.total_steps - done) * (last - first) / steps


def is_over(report: Report, *, now: float) -> bool:
    """Returns whether a run has ended; `now` is in seconds since the epoch. One without a record of its stage has ended
    if it has a summary, or if nothing was logged for ten minutes."""
    if report.stage != UNKNOWN:
        return report.stage not in {stage.value for stage in LIVING}
    return now - (_last_word(report.recorded) or 0.0) > _SILENT_S


def _last_word(recorded: RunRecord) -> float | None:
    """Returns when the last step or evaluation was logged, in seconds since the epoch."""
    times = [number(line.get("time_s")) for line in (*recorded.windows[-1:], *recorded.evaluations[-1:])]
    return max((at for at in times if at is not None), default=None)
