"""Reads everything that a run directory recorded, once; a missing or damaged file is named and ends nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import RowContents, measured_workload
from dstrain.job.schema import Job
from dstrain.monitor.expert_balance import LoadMap
from dstrain.monitor.expert_balance import newest as newest_loads
from dstrain.monitor.metrics import current_steps, read_jsonl
from dstrain.monitor.outcomes import GeneratedText, Preflight, newest
from dstrain.monitor.windows import VERDICT, Line, number, peaks_by_rank, states_by_rank
from dstrain.oom import OutOfMemory
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.speed.step_time import delayed, speed
from dstrain.records import from_data, load_json
from dstrain.removed import JOB
from dstrain.rundir import RunDir, State, cause_of

_NAMES = tuple(field.name for field in fields(RowContents))


def trained_contents(windows: Sequence[Line]) -> RowContents | None:
    """Returns the contents of rows, the mean over the tokens of all windows; None if a window has none, or nonsense.

    >>> one = {"tokens": 300, "sample_tokens": 10.0, "attended_tokens": 20.0, "target_share": 0.5}
    >>> trained_contents([one, {**one, "tokens": 100, "attended_tokens": 40.0}])
    RowContents(sample_tokens=10.0, attended_tokens=25.0, target_share=0.5)
    >>> trained_contents([{**one, "attended_tokens": 0.0}])
    """
    rows = [[number(window.get(name)) for name in ("tokens", *_NAMES)] for window in windows]
    known = [[value for value in row if value is not None] for row in rows]
    total = sum(row[0] for row in known if row)
    if not total or any(len(row) != len(_NAMES) + 1 for row in known):
        return None
    means = (sum(row[0] * row[index] for row in known) / total for index in range(1, len(_NAMES) + 1))
    with suppress(DstrainError):
        return from_data(RowContents, dict(zip(_NAMES, means, strict=True)), locate=str)
    return None


def as_trained(
    estimate: Estimate | None, model: ModelFacts | None, cluster: Cluster | None, contents: RowContents | None
) -> Estimate | None:
    """Returns the estimate with the speed for rows with these contents, if it has a speed and they are known."""
    if estimate is None or estimate.speed is None or model is None or cluster is None or contents is None:
        return estimate
    known = speed(measured_workload(model, cluster, contents), estimate.configuration)
    if known is None:
        return estimate
    return replace(estimate, speed=delayed(known, estimate.memory.retries_per_step))


def contents_text(estimate: Estimate | None, contents: RowContents | None) -> str:
    """Returns the rows that times are planned for, in words; empty if they are planned for whole rows."""
    if estimate is None or estimate.speed is None or contents is None:
        return ""
    labels = f"{contents.target_share:.0%} of the tokens with a label"
    if not estimate.configuration.batch.packing:
        return f"times are planned for the rows of this run: {labels}"
    return f"times are planned for the rows of this run: samples of {contents.sample_tokens:,.0f} tokens, {labels}"


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Records of a run directory; missing or unreadable ones are None or empty."""

    run_dir: RunDir
    state: State | None
    job: Job | None
    estimate: Estimate | None
    """The prediction for this run, with the speed for its actual rows."""
    model: ModelFacts | None
    cluster: Cluster | None
    """None also if its GPU was assumed."""
    versions: Mapping[str, str]
    """Package → version that trained."""
    ds_config: Mapping[str, Any] | None
    windows: tuple[Line, ...]
    """Metrics of each logged window, without steps that a resume repeated."""
    experts: LoadMap | None
    """The load of each expert at the last checkpoint or at the end; None of a dense model, or before that."""
    peaks: tuple[float, ...]
    """The largest peak of each rank's GPU in bytes; empty if it was not measured, as on a CPU."""
    evaluations: tuple[Line, ...]
    """Metrics of each evaluation."""
    findings: tuple[Line, ...]
    """Warnings of the health rules."""
    states: tuple[Mapping[str, int], ...]
    """Measured bytes of model states, by rank."""
    preflight: Preflight | None
    """The checks before the first step of the last start."""
    out_of_memory: OutOfMemory | None
    """Memory of a rank that ran out of GPU memory in the last start."""
    verdict: Line | None
    """Verdict of the last start's first steps on the plan (`monitor.verdict.Verdict.to_data`)."""
    samples: tuple[GeneratedText, ...]
    """The texts that the model generated last, if the job asks for some."""
    summary: Line
    """Rank 0's summary; empty if training has not ended well."""
    resumes: tuple[int, ...]
    """The step from which each start resumed, restarts among them."""
    restarts: tuple[Line, ...]
    """When and why a failed run was started again (`launch.run.state.note_restart`)."""
    adaptations: tuple[Line, ...]
    """Changes after an out-of-memory (`launch.run.out_of_memory.note_adaptation`)."""
    edits: tuple[Line, ...] | None
    """Hand edits in effect."""
    failure: str | None
    """The report of a failed run, whose first line is the cause."""

    @property
    def cause(self) -> str:
        """Why the run failed, in a line, as `dstrain run` said; empty if it did not fail."""
        return cause_of(self.failure)

    unread: tuple[str, ...]
    """Files that cannot be read, and why."""


_FACTS: tuple[tuple[str, type[Any]], ...] = (("model", ModelFacts), ("cluster", Cluster))


def read(run_dir: RunDir) -> RunRecord:
    """Reads the records of a run directory. Raises InvalidConfig if the folder is no run directory."""
    _refuse_other_folders(run_dir)
    reader = _Reader()
    lines = [line for line in reader.lines(run_dir.metrics) if _has_place(line)]
    logged = _last_words(current_steps(lines))
    facts = reader.mapping(run_dir.facts)
    run, job = reader.record(State, run_dir.state), reader.record(Job, run_dir.request, upgrade=_of_today)
    # these files outlive a start from the beginning in the same folder, and only time tells the runs apart
    restarts = _of_this_run(list(filter(_is_restart, reader.lines(run_dir.restarts))), logged, run)
    windows = tuple(line for line in logged if "loss" in line)
    model, cluster = (reader.part(kind, facts.get(name), f"{run_dir.facts.name}: {name}") for name, kind in _FACTS)
    return RunRecord(
        run_dir=run_dir,
        state=run,
        job=job,
        estimate=as_trained(reader.record(Estimate, run_dir.plan), model, cluster, trained_contents(windows)),
        model=model,
        cluster=cluster,
        versions={name: value for name, value in _mapping(facts.get("versions")).items() if isinstance(value, str)},
        ds_config=reader.mapping(run_dir.ds_config) or None,
        windows=windows,
        experts=newest_loads(_of_this_run(lines, logged, run)),
        peaks=peaks_by_rank(windows),
        evaluations=tuple(line for line in logged if "eval_loss" in line),
        findings=tuple(filter(_is_finding, _of_this_run(reader.lines(run_dir.health), logged, run))),
        states=states_by_rank(reader.mapping(run_dir.states)),
        preflight=reader.record(Preflight, run_dir.preflight),
        out_of_memory=reader.record(OutOfMemory, run_dir.oom),
        verdict=next((line for line in lines[::-1] if line.get("event") == VERDICT), None),
        samples=newest(reader.lines(run_dir.samples)) if job is not None and job.samples is not None else (),
        summary=reader.mapping(run_dir.summary),
        resumes=tuple(line["from_step"] for line in lines if line.get("event") == "resume"),
        restarts=tuple(restarts),
        adaptations=_adaptations(reader.lines(run_dir.adaptations), restarts),
        edits=reader.edits(run_dir.edits),
        failure=reader.text(run_dir.failure),
        unread=tuple(reader.problems),
    )


def _refuse_other_folders(run_dir: RunDir) -> None:
    marks = (run_dir.state, run_dir.request, run_dir.metrics, run_dir.summary)
    if not any(path.exists() for path in marks):
        raise InvalidConfig(
            f"{run_dir.path} is not a run directory: it has none of {', '.join(path.name for path in marks)}",
            hint="Name the output_dir of a job that `dstrain run` has started.",
        )


class _Reader:
    """Reads files, and collects the names of those that cannot be read; one that is missing is no problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def text(self, path: Path) -> str | None:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problems.append(f"{path.name} cannot be read: {error.strerror or error}")
            return None

    def data(self, path: Path) -> Any:
        text = self.text(path)
        if text is None:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            self.problems.append(f"{path.name} is damaged: {error}")
            return None

    def mapping(self, path: Path) -> Mapping[str, Any]:
        return _mapping(self.data(path))

    def record(self, kind: type[T], path: Path, *, upgrade: Callable[[Any], Any] = lambda data: data) -> T | None:
        if not path.exists():
            return None
        try:
            return load_json(kind, path, upgrade=upgrade)
        except DstrainError as error:
            self._note(path.name, error)
            return None

    def part(self, kind: type[T], data: Any, name: str) -> T | None:
        try:
            return None if data is None else from_data(kind, data, locate=lambda place: "/".join(map(str, place)))
        except DstrainError as error:
            self._note(name, error)
            return None

    def lines(self, path: Path) -> list[dict[str, Any]]:
        try:
            return read_jsonl(path)
        except OSError as error:
            self.problems.append(f"{path.name} cannot be read: {error.strerror or error}")
            return []

    def edits(self, path: Path) -> tuple[Line, ...] | None:
        data = self.data(path)
        listed = data if isinstance(data, list) else None
        return None if listed is None else tuple(edit for edit in listed if isinstance(edit, dict) and "key" in edit)

    def _note(self, name: str, error: DstrainError) -> None:
        self.problems.append(f"{name} is damaged, or of another dstrain")


def _of_today(job: Any) -> Any:
    """Returns the data of a job without keys that are gone; a value that is gone stays, since no other says the same.

    >>> _of_today({"seed": 1, "audio_max_seconds": 30, "monitor": {"sinks": [], "notify": {}}})
    {'seed': 1, 'monitor': {'sinks': []}}
    """
    return _without(job, "") if isinstance(job, dict) else job


def _without(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if f"{prefix}{key}" not in JOB}
    return {
        key: _without(value, f"{prefix}{key}.") if isinstance(value, dict) else value for key, value in kept.items()
    }


def _last_words(logged: Sequence[Line]) -> list[Line]:
    """Returns the logged steps without those that a start from the beginning repeated, which writes no resume."""
    kept: list[Line] = []
    for line in logged:
        kind = "eval_loss" in line
        while kept and (kept[-1]["step"], "eval_loss" in kept[-1]) >= (line["step"], kind):
            kept.pop()
        kept.append(line)
    return kept


def _of_this_run(lines: Sequence[Line], logged: Sequence[Line], run: State | None) -> list[Line]:
    """Drops lines of an earlier run in the same folder, which are older than the first step."""
    times = [number(line.get("time_s")) for line in logged[:1]] + [run.began if run is not None else None]
    # a start from the beginning logs no resume, so that time alone tells its lines from an earlier run's
    first = min((at for at in times if at is not None), default=0.0)
    return [line for line in lines if (number(line.get("time_s")) or first) >= first]


def _mapping(data: Any) -> Mapping[str, Any]:
    return data if isinstance(data, dict) else {}


def _has_place(line: Line) -> bool:
    """Returns whether a line of the metrics belongs to a step, or says where a resume began."""
    key = "from_step" if line.get("event") == "resume" else "step"
    return isinstance(line.get(key), int)


def _is_finding(line: Line) -> bool:
    return isinstance(line.get("step"), int) and all(isinstance(line.get(key), str) for key in ("rule", "message"))


def _is_restart(line: Line) -> bool:
    numbers = (number(line.get(key)) for key in ("time_s", "from_step"))
    texts = all(isinstance(line.get(key), str) for key in ("cause", "change"))
    return texts and all(value is not None and 0 <= value < _LATEST_S for value in numbers)


def _adaptations(lines: Sequence[Line], restarts: Sequence[Line]) -> tuple[Line, ...]:
    """Returns the changes with which the run was started again."""
    changes = {restart["change"] for restart in restarts}
    return tuple(line for line in filter(_is_adaptation, lines) if line["change"] in changes)


def _is_adaptation(line: Line) -> bool:
    kinds = {"change": str, "set": list, "ds_config": dict}
    return all(isinstance(line.get(key), kind) for key, kind in kinds.items())


_LATEST_S = 2**36
"""A time after which no run restarts, in seconds since the epoch: the year 4147."""
