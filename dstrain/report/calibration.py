"""Decides which measurements of a run count for a calibration (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import measured_links
from dstrain.facts.cluster.calibration import Calibration
from dstrain.facts.workload import Workload
from dstrain.job.schema import HealthRule
from dstrain.monitor.run_record import RunRecord, trained_contents
from dstrain.monitor.windows import Measurement, measurement
from dstrain.paths import shown
from dstrain.plan.calibration import Observed
from dstrain.plan.configuration import Configuration
from dstrain.units import counted

FEWEST_WINDOWS, FEWEST_STEPS = 3, 10
"""Fewer windows or steps after those that warm up give no step time."""
MOST_DATA_WAIT = 0.05
"""Share of the time from which waiting for data makes a step time useless. Source: the health rule `data_wait`."""
FULL_ROWS = 0.95
"""Share of the planned tokens of a step below which a run had shorter rows than the plan."""
SAME_OUTSIDE = 1.1
"""Ratio of the ranks' memory outside of PyTorch from which another process may be on a GPU."""

COMPILED = "torch.compile, whose kernels are others than those that the constants describe"
"""Why a compiled run tells nothing of them."""

SLOWED = {
    HealthRule.SLOWDOWN,
    HealthRule.SLOW_RANK,
    HealthRule.DATA_WAIT,
}
"""Rules of health that mean steps of another length than the machine's."""

VERSIONED = ("torch", "deepspeed", "transformers")
"""Packages whose releases decide memory and speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run, and what of it does not count."""

    observed: Observed
    measurement: Measurement | None
    """None of a shared record, which has what counts of it alone."""
    left_out: tuple[str, ...]
    """Measurements that do not count and why, one sentence each."""
    versions: str | None
    """Releases that trained, such as `torch 2.13.0, deepspeed 0.19.8`; None if the run did not record them."""


def observed(record: RunRecord, calibration: Calibration) -> ObservedRun:
    """Returns the measurements of a run for a calibration. Raises InvalidConfig if it tells nothing."""
    workload, configuration = _planned(record, calibration)
    found = measurement(record.windows)
    workload = replace(workload, contents=trained_contents(record.windows))
    name = shown(str(record.run_dir.path))
    if not found.ranks:
        raise InvalidConfig(f"{name}: no step was measured", hint="Train for some tens of steps first.")
    batch, parallel = configuration.batch, configuration.parallel
    shares = workload.cluster.num_gpus / (parallel.sp * parallel.tp)
    planned_tokens = batch.tokens * configuration.step.grad_accum * shares
    slowed = list(_slowed(record, found))
    short = found.tokens_per_step / planned_tokens
    left_out = [f"its step time: {reason}" for reason in slowed]
    if is_short := short < FULL_ROWS:
        left_out.append(f"its step time and allocator: a step has {short:.0%} of the planned tokens, padding included")
    if is_compiled := configuration.kernels.torch_compile:
        left_out.append(f"its step time and allocator: {COMPILED}")
    if found.alloc_retries:
        left_out.append("its allocator: the GPU was full, so that cached memory went back to the driver")
    outside = [rank.outside_bytes for rank in found.ranks if rank.outside_bytes]
    is_shared = bool(outside) and max(outside) > SAME_OUTSIDE * min(outside)
    if is_shared:
        left_out.append("its memory outside of PyTorch: the ranks differ by more than 10 %, as with other processes")
    reserved = [rank.reserved_bytes for rank in found.ranks if rank.reserved_bytes]
    is_timed = not (slowed or is_short or is_compiled) and found.tokens_per_s is not None
    if is_timed:
        left_out.insert(0, f"steps that warm up, from its step time: {found.warm_up_steps}")
    # the allocator of a full GPU holds what the GPU has, which says nothing of the need
    is_full = bool(found.alloc_retries)
    what_counts = Observed(
        name=name,
        workload=workload,
        configuration=configuration,
        # from the pace: a step with rows up to 5 % shorter than planned takes less time than a full one
        step_s=planned_tokens / found.tokens_per_s if is_timed and found.tokens_per_s else None,
        error_ratio=found.error_ratio,
        reserved_bytes=max(reserved) if reserved and not (is_short or is_compiled or is_full) else None,
        outside_bytes=round(median(outside)) if outside and not is_shared else None,
    )
    versions = releases(record.versions)
    return ObservedRun(observed=what_counts, measurement=found, left_out=tuple(left_out), versions=versions)


def releases(recorded: Mapping[str, Any]) -> str | None:
    """Returns the releases that decide memory and speed, in words; None if none is recorded."""
    return ", ".join(f"{name} {recorded[name]}" for name in VERSIONED if name in recorded) or None


def _planned(record: RunRecord, calibration: Calibration) -> tuple[Workload, Configuration]:
    """Returns workload and configuration of a run. Raises InvalidConfig if one is unknown or nothing is predicted."""
    name, model, cluster = shown(str(record.run_dir.path)), record.model, record.cluster
    if model is None or cluster is None or record.estimate is None:
        what = "its machines" if cluster is None else "its model" if model is None else "its plan"
        why = f" ({'; '.join(record.unread)})" if record.unread else ""
        raise InvalidConfig(f"{name}: {what} is unknown, so nothing was predicted{why}", hint="Leave it out.")
    if cluster.gpu.is_cpu:
        raise InvalidConfig(
            f"{name}: trained on a CPU, for which no time is predicted",
            hint="Calibrate with runs that trained on GPUs.",
        )
    if not cluster.gpu.is_listed:
        raise InvalidConfig(f"{name}: {cluster.gpu.name} is not in the table of GPUs", hint="Leave it out.")
    rates = measured_links.with_rates(calibration, cluster)
    return Workload(model=model, cluster=cluster, calibration=rates), record.estimate.configuration


def _slowed(record: RunRecord, found: Measurement) -> Iterator[str]:
    """Yields why the step time of a run is not its machine's."""
    if found.windows < FEWEST_WINDOWS or found.steps < FEWEST_STEPS:
        few = f"{counted(found.steps, 'step')} in {counted(found.windows, 'window')}"
        yield f"{few} after those that warm up are too few"
    if found.data_wait_share > MOST_DATA_WAIT:
        yield f"it waited for data for {found.data_wait_share:.0%} of the time"
    marks = {line["rule"]: line["step"] for line in record.findings if line["rule"] in SLOWED}
    for rule, step in marks.items():
        if rule != HealthRule.DATA_WAIT or found.data_wait_share <= MOST_DATA_WAIT:
            yield f"health rule {rule} at step {step}"
