"""Advises a change after the first steps, with its gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dstrain.config.remedy import remedy
from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload, measured_workload
from dstrain.job.monitor import HealthRule
from dstrain.job.schema import Job
from dstrain.monitor.comparison import Difference, Measured, Part, communication_s, middle, step_parts
from dstrain.monitor.comparison_text import TIME_NOTES
from dstrain.monitor.health.rules import RULES
from dstrain.monitor.traffic import Kind
from dstrain.monitor.windows import Line
from dstrain.oom import Phase
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import USABLE_GPU_RATIO, assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.search.out_of_memory import Shortage, fixes
from dstrain.units import format_bytes, format_seconds

MEMORY_RANGE = 1 - USABLE_GPU_RATIO
"""Tolerated difference of memory from the plan: the share of a GPU that plans leave free."""
SLOW_LINK = RULES[HealthRule.BUS_BANDWIDTH].warn
"""Share of the planned bandwidth below which links are the cause."""
_WORKERS = (2, 4, 8, 16)
"""Processes of the data loader that are proposed, each time the next more."""


class Judged(Measured, Protocol):
    """A run whose plan is judged, with the job that may be changed."""

    @property
    def job(self) -> Job:
        """The job."""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration."""

    @property
    def model(self) -> ModelFacts | None:
        """None if its family is unknown."""


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


def more_workers(run: Judged, cause: Difference) -> Advice | None:
    """Returns more processes for the data loader; None if there are many already."""
    now, (gain, ratio) = run.job.dataloader_num_workers, most_saved(run, cause)
    more = next((count for count in _WORKERS if count > now), None)
    if more is None:
        return None
    return Advice(setting=f"dataloader_num_workers: {more} in the job (now {now})", gain=gain, step_ratio=ratio)


def most_saved(run: Judged, cause: Difference) -> tuple[str, float]:
    """Returns what a change saves at most, what a part takes beyond the plan: in words, and as a share of a step."""
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


def faster(run: Judged, cause: Difference, estimate: Estimate) -> tuple[Advice | None, str]:
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


def larger_bucket(run: Judged, estimate: Estimate) -> Advice | None:
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


def _of_reductions(run: Measured, figure: str) -> float:
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


def _overlapped(run: Judged, cause: Difference, estimate: Estimate) -> tuple[Advice | None, str]:
    """Returns what `overlap_comm` brings: what the plan says that it hides, more of it the longer collectives take.

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


def less_memory(run: Judged, estimate: Estimate) -> tuple[Advice | None, str]:
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
    stages = (1, 2) if estimate.configuration.zero.stage in (1, 2) else (estimate.configuration.zero.stage,)
    with suppress(DstrainError):
        for fix in fixes(workload, estimate, short, stages=stages):
            block = run.model.moe.block_class if run.model.moe is not None and run.job.ep == 1 else None
            change = remedy(fix, estimate.configuration, run.ds_config, moe_block=block)
            gain = f"{', '.join(part for part in (change.change, change.price) if part)} ({tight} now)"
            needed = change.device_bytes_per_gpu
            advice = Advice(setting=change.settings, gain=gain, step_ratio=fix.step_ratio, device_bytes_per_gpu=needed)
            return advice, ""
    return None, tight


def _shortage(windows: Sequence[Line], workload: Workload, estimate: Estimate) -> Shortage | None:
    """Returns the used and the total memory of PyTorch's allocator on the fullest rank; None if not measured."""
    held, outside = (_most(windows, name) for name in ("reserved_bytes_by_rank", "outside_bytes_by_rank"))
    if held is None:
        return None
    planned = outside_bytes(workload.cluster, estimate.configuration, workload.measured)
    total = workload.cluster.gpu.memory_bytes
    return Shortage(
        phase=Phase.FORWARD,
        limit_bytes=total - (planned if outside is None else outside),
        needed_bytes=held,
        predicted_bytes=estimate.memory.device_bytes_per_gpu - planned,
    )


def _most(windows: Sequence[Line], name: str) -> int | None:
    values = [value for window in windows for value in window.get(name) or () if isinstance(value, int | float)]
    return round(max(values)) if values else None
