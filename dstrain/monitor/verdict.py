"""The verdict after the first steps: measured figures beside the plan, the largest difference, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dstrain import units
from dstrain.config.remedy import remedy
from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload, measured_workload
from dstrain.job.schema import HealthRule
from dstrain.monitor.comparison import (
    TIME_NOTES,
    Comparison,
    Difference,
    Part,
    StepPart,
    communication_s,
    comparisons,
    difference_text,
    differences,
    middle,
    planned_speed,
    split_text,
    step_parts,
    table,
)
from dstrain.monitor.health.rules import RULES
from dstrain.monitor.metrics import without_nonfinite
from dstrain.monitor.run_record import RunRecord, as_trained, contents_text, read, trained_contents
from dstrain.monitor.traffic import Expected, Kind, Message
from dstrain.monitor.windows import VERDICT, Line, by_rank, counted, settled
from dstrain.oom import Phase
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import USABLE_GPU_RATIO, assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.search.out_of_memory import Shortage, fixes
from dstrain.plan.speed import collectives
from dstrain.plan.speed.efficiency import Efficiency, efficiency
from dstrain.units import format_bytes, format_seconds


def link_seconds(model: ModelFacts | None, cluster: Cluster | None) -> Expected | None:
    """Returns the seconds of a message by the planner's rates: calibrated, measured, or the data sheet's.

    None if machines are unknown, or if their ranks are CPUs whose links nobody measured.
    """
    if model is None or cluster is None or (cluster.gpu.is_cpu and not _is_measured(cluster)):
        return None
    with suppress(DstrainError):  # of a damaged calibration, which `dstrain run` reports
        rates = efficiency(cluster, measured_workload(model, cluster).measured)
        return lambda message: _seconds(message, cluster, rates)
    return None


def _is_measured(cluster: Cluster) -> bool:
    origin = cluster.intra_link_origin if cluster.num_nodes == 1 else cluster.inter_link_origin
    return origin is Origin.MEASURED


def _seconds(message: Message, cluster: Cluster, rates: Efficiency) -> float | None:
    """Returns the seconds of a message; None for a kind that the planner does not know."""
    if message.kind is Kind.OTHER or len(message.ranks) < 2:
        return None
    collective = collectives.Collective(
        phase=collectives.Phase.STEP,
        num_bytes=message.num_bytes,
        messages=1,
        ranks=len(message.ranks),
        passes=2 if message.kind is Kind.ALL_REDUCE else 1,
        stride=message.ranks[1] - message.ranks[0],
        is_ring=message.kind is not Kind.ALL_TO_ALL,
    )
    return collective.seconds(cluster, rates)


MEMORY_RANGE = 1 - USABLE_GPU_RATIO
"""Tolerated difference of memory from the plan: the share of a GPU that plans leave free."""
SLOW_LINK = RULES[HealthRule.BUS_BANDWIDTH].warn
"""Share of the planned bandwidth below which links are the cause."""
_WORKERS = (2, 4, 8, 16)
"""Processes of the data loader that are proposed, each time the next more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The change."""

    setting: str
    """The line to change, as it is written."""
    gain: str
    """Its gain, in words."""
    step_ratio: float | None = None
    """How much longer a step takes, as a share of what it takes now; None if that is unknown."""
    device_bytes_per_gpu: int | None = None
    """Predicted memory of a GPU; None if that does not change."""


def more_workers(run: RunRecord, cause: Difference) -> Advice | None:
    """Returns more processes for the data loader; None if there are many already."""
    if run.job is None:
        return None
    now, (gain, ratio) = run.job.dataloader_num_workers, most_saved(run, cause)
    more = next((count for count in _WORKERS if count > now), None)
    if more is None:
        return None
    return Advice(setting=f"dataloader_num_workers: {more} in the job (now {now})", gain=gain, step_ratio=ratio)


def most_saved(run: RunRecord, cause: Difference) -> tuple[str, float]:
    """Returns the most that a change saves, the time of a part beyond the plan, in words and as a share of a step."""
    saved, step_s = cause.measured - cause.planned, sum(part.measured for part in step_parts(run))
    text = f"up to {format_seconds(saved)} of a step of {format_seconds(step_s)} ({100 * saved / step_s:.0f} %)"
    return text, -saved / step_s


_SMALL_MESSAGE = 2**22
"""Mean bytes of a collective below which its start takes more than its bytes, on links of tens of GB/s."""
_BUCKETS = (50_000_000, 200_000_000, 500_000_000)
"""Elements of a bucket that are proposed, each time the next more; the last is DeepSpeed's default."""
_REDUCTIONS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
"""Collectives with which DeepSpeed reduces gradients: the first under ZeRO-1 and 2, the second under ZeRO-3.
Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: allreduce_and_scatter; stage3.py: __avg_scatter_grads"""
_WORTH_A_CHANGE = RULES[HealthRule.DATA_WAIT].warn
"""Share of a step that a larger bucket has to save at most to be proposed: that from which waiting for data is."""


def faster(run: RunRecord, cause: Difference, estimate: Estimate) -> tuple[Advice | None, str]:
    """Returns the change for a part of the time that is longer than planned, or a note."""
    if cause.part in TIME_NOTES:
        return None, TIME_NOTES[cause.part]
    share = middle(run.windows, "bus_share")
    if share is not None and share < SLOW_LINK:
        return None, f"links reach {share:.0%} of what the plan expects: `dstrain doctor --network` measures them"
    zero = estimate.configuration.zero
    nbytes, calls = middle(run.windows, "comm_bytes"), middle(run.windows, "comm_calls")
    more = _next_bucket(estimate)
    if nbytes and calls and nbytes / calls < _SMALL_MESSAGE and more is not None and zero.stage in (1, 2, 3):
        gain, ratio = most_saved(run, cause)
        why = f"{calls:,.0f} collectives of {format_bytes(nbytes / calls)} on average become fewer and larger"
        return Advice(setting=_bucket_setting(estimate, more), gain=f"{gain}: {why}", step_ratio=ratio), ""
    if zero.stage > 0 and not zero.overlap_comm:
        return _overlapped(run, cause, estimate)
    return None, "more tokens between collectives hide them: a larger micro_batch, or grad_accum under ZeRO-1"


def larger_bucket(run: RunRecord, estimate: Estimate) -> Advice | None:
    """Returns a larger bucket if starting reductions of gradients takes a notable part of a step; None if not.

    Needs no planned time: reductions are counted, and each takes at least the latency of the links, which `dstrain
    doctor --network` measures. Fewer of them save at most what the rank that waits least waits for collectives.
    """
    zero, latency_s, more = estimate.configuration.zero, _latency_s(run.cluster), _next_bucket(estimate)
    calls, nbytes, seconds = (_of_reductions(run, name) for name in ("calls", "bytes", "s"))
    step_s = middle(run.windows, "step_s")
    if zero.stage == 0 or latency_s is None or more is None or not calls or not step_s:
        return None
    waits = sum(part.measured for part in step_parts(run) if part.part is Part.COMMUNICATION)
    fewer = -(-_reduced(estimate) // more) * (1 if zero.stage == 1 else estimate.configuration.step.grad_accum)
    most = min(seconds, waits)
    least = min((calls - fewer) * latency_s, most)
    if least < _WORTH_A_CHANGE * step_s:
        return None
    saved = " to ".join(f"{format_seconds(one)} ({100 * one / step_s:.0f} %)" for one in (least, most))
    why = f"{calls:,.0f} reductions of {format_bytes(nbytes / calls)} on average become {fewer:,}; each takes at least"
    why += f" {1000 * latency_s:.2g} ms, however small (`dstrain doctor --network`)"
    text = f"{saved} of a step of {format_seconds(step_s)}: {why}"
    return Advice(setting=_bucket_setting(estimate, more), gain=text, step_ratio=-least / step_s)


def _of_reductions(run: RunRecord, figure: str) -> float:
    """Returns the number, the bytes or the seconds of a step's reductions of gradients; 0 if they were not counted."""
    return sum(middle(run.windows, f"comm/{kind}_{figure}") or 0.0 for kind in _REDUCTIONS)


def _latency_s(cluster: Cluster | None) -> float | None:
    """Returns the time of the smallest all-reduce of all ranks; None if nobody measured it."""
    if cluster is None:
        return None
    return (cluster.intra_link if cluster.num_nodes == 1 else cluster.inter_link).latency_s


def _reduced(estimate: Estimate) -> int:
    """Returns the elements of gradients that a rank reduces at a time."""
    return estimate.num_trainable_params // estimate.configuration.parallel.tp


def _next_bucket(estimate: Estimate) -> int | None:
    """Returns the next larger bucket, which holds all gradients at most; None if there is none."""
    now = estimate.configuration.zero.reduce_bucket_size
    more = next((min(size, max(2, _reduced(estimate))) for size in _BUCKETS if size > now), None)
    return more if more is not None and more > now else None


def _bucket_setting(estimate: Estimate, more: int) -> str:
    now = estimate.configuration.zero.reduce_bucket_size
    return f"zero_optimization.reduce_bucket_size: {more} in ds_config.json (now {now})"


def _overlapped(run: RunRecord, cause: Difference, estimate: Estimate) -> tuple[Advice | None, str]:
    """Returns the gain of `overlap_comm`: the share that the plan hides, of the time that collectives take.

    The share that is hidden is the plan's; a note if it hides nothing, or if its buffers do not fit.
    """
    setting = "zero_optimization.overlap_comm: true in ds_config.json (now false)"
    before, step_s = estimate.speed, sum(part.measured for part in step_parts(run))
    if run.model is None or run.cluster is None or before is None:
        return Advice(setting=setting, gain=f"up to {format_seconds(cause.measured)} of a step"), ""
    workload = measured_workload(run.model, run.cluster)
    after = assess(workload, changed(estimate.configuration, overlap_comm=True))
    if not after.fits:
        return None, f"overlap_comm needs {format_bytes(after.memory.device_bytes_per_gpu)} of a GPU and does not fit"
    # times of the plan may be off, so only their ratio is taken, and applied to the time that was measured
    hidden = 0.0 if after.speed is None else 1 - communication_s(after.speed) / communication_s(before)
    saved = min(hidden * cause.measured, step_s)
    if saved <= 0:
        return None, "overlap_comm hides nothing, by the plan: a larger micro_batch, or grad_accum under ZeRO-1"
    gain = (
        f"about {format_seconds(saved)} of a step of {format_seconds(step_s)} ({100 * saved / step_s:.0f} %) hide"
        f" behind the backward pass: {100 * hidden:.0f} % of the waiting, by the plan"
    )
    return Advice(
        setting=setting,
        gain=gain,
        step_ratio=-saved / step_s,
        device_bytes_per_gpu=after.memory.device_bytes_per_gpu,
    ), ""


def less_memory(run: RunRecord, estimate: Estimate) -> tuple[Advice | None, str]:
    """Returns the fastest change that fits with what was measured, and a note if none is needed or known.

    The planner searches as after an out-of-memory: a second or two, once, and only if less than a tenth is free.
    """
    if run.model is None or run.cluster is None or run.cluster.gpu.is_cpu:
        return None, ""
    workload = measured_workload(run.model, run.cluster)
    short = _shortage(run.windows, workload, estimate)
    if short is None:
        return None, ""
    total = run.cluster.gpu.memory_bytes
    free = short.limit_bytes - short.needed_bytes
    if free >= MEMORY_RANGE * total:
        return None, f"still fits: {format_bytes(free)} of {format_bytes(total)} free"
    tight = f"only {format_bytes(max(0, free))} of {format_bytes(total)} are free"
    # ZeRO-1 and 2 read each other's checkpoints, other stages only their own
    stages = (1, 2) if estimate.configuration.zero.stage in (1, 2) else (estimate.configuration.zero.stage,)
    with suppress(DstrainError):
        for fix in fixes(workload, estimate, short, stages=stages):
            ep = run.job.ep if run.job is not None else 1
            # AutoEP has blocks of its own, so that ZeRO-3 has no leaf module to name
            block = run.model.moe.block_class if run.model.moe is not None and ep == 1 else None
            change = remedy(fix, estimate.configuration, run.ds_config or {}, moe_block=block)
            gain = f"{', '.join(part for part in (change.change, change.price) if part)} ({tight} now)"
            needed = change.device_bytes_per_gpu
            advice = Advice(setting=change.settings, gain=gain, step_ratio=fix.step_ratio, device_bytes_per_gpu=needed)
            return advice, ""
    return None, tight


def _shortage(windows: Sequence[Line], workload: Workload, estimate: Estimate) -> Shortage | None:
    """Returns the used and the total memory of PyTorch's allocator on the fullest rank; None if not measured."""
    held, outside = (by_rank(windows, name) for name in ("reserved_bytes_by_rank", "outside_bytes_by_rank"))
    if not held:
        return None
    planned = outside_bytes(workload.cluster, estimate.configuration, workload.measured)
    total = workload.cluster.gpu.memory_bytes
    return Shortage(
        phase=Phase.FORWARD,
        limit_bytes=total - (round(max(map(max, outside))) if outside else planned),
        needed_bytes=round(max(map(max, held))),
        predicted_bytes=estimate.memory.device_bytes_per_gpu - planned,
    )


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

    record: RunRecord
    """The records of the run at its start."""
    windows: list[Line] = field(default_factory=list)
    is_judged: bool = False
    link_seconds: Expected | None = field(init=False, default=None)
    """Predicts the time of a collective on the plan's links; None if they are not known."""

    def __post_init__(self) -> None:
        """Reads the rates of the links."""
        self.link_seconds = link_seconds(self.record.model, self.record.cluster)

    @property
    def planned_step_s(self) -> float | None:
        """Planned seconds of a step; None if the plan has no time for the GPUs."""
        speed = planned_speed(self.record)
        return speed.step_s if speed is not None else None

    def see(self, window: Line, *, steps: int) -> Verdict | None:
        """Returns the verdict once enough of the steps of this start, `steps` so far, have warmed up."""
        record = self.record
        if self.is_judged or record.estimate is None or "loss" not in window:
            return None
        self.windows.append(without_nonfinite(window))
        has_settled = len(settled(self.windows).windows) > 1
        if steps < (FEWEST_STEPS if has_settled else LATEST_STEPS) or len(self.windows) < 2:
            return None
        self.is_judged = True
        contents = trained_contents(self.windows)
        estimate = as_trained(record.estimate, record.model, record.cluster, contents) or record.estimate
        run = replace(record, windows=tuple(self.windows), states=read(record.run_dir).states, estimate=estimate)
        found = judge(run, steps=steps, estimate=estimate)
        return replace(found, note="; ".join(filter(None, (found.note, contents_text(estimate, contents)))))


def judge(run: RunRecord, *, steps: int, estimate: Estimate) -> Verdict:
    """Compares the windows of a run with its plan."""
    # what the plan did not promise is no difference: each quantity has its own range of error
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


def _as_planned(run: RunRecord) -> str:
    memory = f"memory ± {100 * MEMORY_RANGE:.0f} %"
    speed = planned_speed(run)
    if speed is None:
        on_cpu = run.cluster is not None and run.cluster.gpu.is_cpu
        why = "on a CPU" if on_cpu else "for this GPU"
        what = "bytes are as planned" if run.states else "no bytes were measured yet"
        return f"no time is planned {why}; {what} ({memory})"
    time = f"time ± {100 * speed.uncertainty_ratio:.0f} %"
    return f"as planned: nothing differs by more than the range of the plan, {time}, {memory}"
