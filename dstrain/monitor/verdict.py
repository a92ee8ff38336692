"""The verdict after the first steps: measured figures beside the plan, the largest difference, and the advice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dstrain import units
from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.schema import Job
from dstrain.monitor.advice import MEMORY_RANGE, Advice, faster, larger_bucket, less_memory, more_workers, most_saved
from dstrain.monitor.comparison import (
    Comparison,
    Difference,
    Part,
    StepPart,
    comparisons,
    differences,
    planned_speed,
    step_parts,
)
from dstrain.monitor.comparison_text import difference_text, split_text, table
from dstrain.monitor.metrics import without_nonfinite
from dstrain.monitor.planned_links import link_seconds
from dstrain.monitor.row_contents import as_trained, contents_text, trained_contents
from dstrain.monitor.traffic import Expected
from dstrain.monitor.windows import VERDICT, Line, counted, settled, states_by_rank
from dstrain.plan.estimate_records import Estimate
from dstrain.records import load_json
from dstrain.rundir import RunDir

FEWEST_STEPS, LATEST_STEPS = 20, 50
"""Steps of a start before the verdict: at least, and at most while steps warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict of a start's first steps on its plan."""

    step: int
    """Optimizer steps done, those before a resume included."""
    steps: int
    """Steps of this start."""
    warm_up: str
    """Which of them do not count in times, in words; empty if all do."""
    comparisons: tuple[Comparison, ...]
    parts: tuple[StepPart, ...]
    """Parts of a step."""
    cause: Difference | None
    """The part that differs most, if it differs by more than the range of the plan."""
    advice: Advice | None
    """None if no setting is known that would help."""
    note: str
    """The note if nothing differs, or if nothing is to be changed."""

    def to_data(self) -> dict[str, Any]:
        """Returns the verdict as JSON-ready data: a line of `metrics.jsonl` that is no step."""
        compared = [asdict(one) | {"off": one.off} for one in self.comparisons]
        return {"event": VERDICT, **asdict(self), "comparisons": compared}

    def lines(self, cluster: Cluster | None) -> Iterator[str]:
        """Yields the verdict as lines for the log."""
        warm_up = f" ({self.warm_up})" if self.warm_up else ""
        yield f"after {units.counted(self.steps, 'step')}, beside the plan{warm_up}:"
        yield from (f"  {line}" for line in table(self.comparisons, cluster))
        if split := split_text(self.parts):
            yield f"  a step: {split}"
        if self.cause is not None:
            yield f"  differs most: {difference_text(self.cause)}"
        if self.advice is not None:
            yield f"  to change: {self.advice.setting}: {self.advice.gain}"
        if self.note:
            yield f"  {self.note}"


@dataclass(slots=True, kw_only=True)
class FirstSteps:
    """Collects the first windows of a start, on rank 0, and judges them once."""

    run_dir: RunDir
    job: Job
    ds_config: Mapping[str, Any]
    model: ModelFacts | None
    cluster: Cluster | None
    estimate: Estimate | None = field(init=False, default=None)
    """The prediction for this run; None if there is none that can be read."""
    windows: list[Line] = field(default_factory=list)
    states: tuple[Mapping[str, int], ...] = ()
    is_judged: bool = False
    link_seconds: Expected | None = field(init=False, default=None)
    """Predicts the time of a collective on the plan's links; None if they are not known."""

    def __post_init__(self) -> None:
        """Reads the prediction."""
        self.link_seconds = link_seconds(self.model, self.cluster)
        with suppress(DstrainError, OSError):
            self.estimate = load_json(Estimate, self.run_dir.plan)

    @property
    def planned_step_s(self) -> float | None:
        """Planned seconds of a step; None if the plan has no time for the GPUs."""
        speed = planned_speed(self)
        return speed.step_s if speed is not None else None

    def see(self, window: Line, *, steps: int) -> Verdict | None:
        """Returns the verdict once enough of the steps of this start, `steps` so far, have warmed up."""
        if self.is_judged or self.estimate is None or "loss" not in window:
            return None
        self.windows.append(without_nonfinite(window))
        has_settled = len(settled(self.windows).windows) > 1
        if steps < (FEWEST_STEPS if has_settled else LATEST_STEPS) or len(self.windows) < 2:
            return None
        self.is_judged = True
        with suppress(OSError, ValueError):
            self.states = states_by_rank(json.loads(self.run_dir.states.read_text(encoding="utf-8")))
        contents = trained_contents(self.windows)
        self.estimate = as_trained(self.estimate, self.model, self.cluster, contents) or self.estimate
        found = judge(self, steps=steps, estimate=self.estimate)
        return replace(found, note="; ".join(filter(None, (found.note, contents_text(self.estimate, contents)))))


def judge(run: FirstSteps, *, steps: int, estimate: Estimate) -> Verdict:
    """Compares the windows of a run with its plan."""
    beyond = [each for each in differences(run) if abs(each.share) > _range_of(each, estimate)]
    cause = max(beyond, key=lambda each: abs(each.share), default=None)
    advice, note = None, ""
    if cause is None:
        advice, note = larger_bucket(run, estimate), _as_planned(run)
    elif cause.share < 0:
        note = "the plan is too cautious: `dstrain report --calibrate` lets the next one use what this run measured"
    elif cause.part is Part.DATA_WAIT:
        advice = more_workers(run, cause)
    elif cause.is_time:
        advice, note = faster(run, cause, estimate)
        note = note and f"{note}; to save: {most_saved(run, cause)[0]}"
    else:
        advice, note = less_memory(run, estimate)
    return Verdict(
        step=int(run.windows[-1]["step"]),
        steps=steps,
        warm_up=counted(run.windows).note,
        comparisons=comparisons(run),
        parts=step_parts(run),
        cause=cause,
        advice=advice,
        note=note,
    )


def _range_of(difference: Difference, estimate: Estimate) -> float:
    """Returns the share by which a part may differ from the plan."""
    speed = estimate.speed if difference.is_time else None
    return speed.uncertainty_ratio if speed is not None else MEMORY_RANGE


def _as_planned(run: FirstSteps) -> str:
    memory = f"memory ± {100 * MEMORY_RANGE:.0f} %"
    speed = planned_speed(run)
    if speed is None:
        on_cpu = run.cluster is not None and run.cluster.gpu.is_cpu
        why = "on a CPU" if on_cpu else "for this GPU"
        what = "bytes are as planned" if run.states else "no bytes were measured yet"
        return f"no time is planned {why}; {what} ({memory})"
    time = f"time ± {100 * speed.uncertainty_ratio:.0f} %"
    return f"as planned: nothing differs by more than the range of the plan, {time}, {memory}"
