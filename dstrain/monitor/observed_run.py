"""Reads what a run measured beside what was planned for it, and decides what of it counts for a calibration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import measured_links
from dstrain.facts.cluster.calibration import Calibration
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.monitor import HealthRule
from dstrain.monitor.row_contents import trained_contents
from dstrain.monitor.sinks.jsonl import current_steps, read_jsonl
from dstrain.monitor.windows import Measurement, measurement
from dstrain.paths import shown
from dstrain.plan.calibration.observed import Observed
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate_records import Estimate
from dstrain.records import from_data, load_json
from dstrain.rundir import RunDir
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
    measurement: Measurement
    left_out: tuple[str, ...]
    """What does not count and why, one sentence each."""
    versions: str | None
    """Releases that trained, such as `torch 2.13.0, deepspeed 0.19.8`; None if the run did not record them."""


def read_run(run_dir: RunDir, calibration: Calibration) -> ObservedRun:
    """Returns what a run measured. Raises InvalidConfig if the folder is no run, or one that tells nothing."""
    facts = _facts(run_dir)
    workload, configuration = _planned(run_dir, facts, calibration)
    lines = current_steps(read_jsonl(run_dir.metrics))
    found = measurement(lines)
    workload = replace(workload, contents=trained_contents([line for line in lines if line.get("tokens")]))
    name = shown(str(run_dir.path))
    if not found.ranks:
        raise InvalidConfig(f"{name}: no step was measured", hint="Train for some tens of steps first.")
    planned_tokens = _tokens_per_step(configuration, workload.cluster.num_gpus)
    slowed = list(_slowed(run_dir, found))
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
    is_full = bool(found.alloc_retries)
    observed = Observed(
        name=name,
        workload=workload,
        configuration=configuration,
        step_s=planned_tokens / found.tokens_per_s if is_timed and found.tokens_per_s else None,
        error_ratio=found.error_ratio,
        reserved_bytes=max(reserved) if reserved and not (is_short or is_compiled or is_full) else None,
        outside_bytes=round(median(outside)) if outside and not is_shared else None,
    )
    versions = recorded if isinstance(recorded := facts.get("versions"), dict) else {}
    return ObservedRun(observed=observed, measurement=found, left_out=tuple(left_out), versions=releases(versions))


def releases(recorded: Mapping[str, Any]) -> str | None:
    """Returns the releases that decide memory and speed, in words; None if none is recorded."""
    return ", ".join(f"{name} {recorded[name]}" for name in VERSIONED if name in recorded) or None


def _facts(run_dir: RunDir) -> dict[str, Any]:
    """Returns what is known about model, machines and releases. Raises InvalidConfig if the folder is no run."""
    try:
        facts = json.loads(run_dir.facts.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = None
    if not isinstance(facts, dict):
        name = shown(str(run_dir.path))
        raise InvalidConfig(f"{name}: not the folder of a run", hint="Give the output_dir of a job.")
    return facts


def _planned(run_dir: RunDir, facts: dict[str, Any], calibration: Calibration) -> tuple[Workload, Configuration]:
    """Returns what ran where. Raises InvalidConfig if it is unknown, or if no calibration could say it."""
    name = shown(str(run_dir.path))
    model, cluster = _fact(run_dir, facts, ModelFacts, "model"), _fact(run_dir, facts, Cluster, "cluster")
    if model is None or cluster is None or not run_dir.plan.exists():
        what = "its machines" if cluster is None else "its model" if model is None else "its plan"
        raise InvalidConfig(f"{name}: {what} is unknown, so nothing was predicted", hint="Leave it out.")
    if cluster.gpu.is_cpu:
        raise InvalidConfig(
            f"{name}: trained on a CPU, for which no time is predicted",
            hint="Calibrate with runs that trained on GPUs.",
        )
    if not cluster.gpu.is_listed:
        raise InvalidConfig(f"{name}: {cluster.gpu.name} is not in the table of GPUs", hint="Leave it out.")
    estimate = load_json(Estimate, run_dir.plan)
    rates = measured_links.with_rates(calibration, cluster)
    return Workload(model=model, cluster=cluster, calibration=rates), estimate.configuration


def _fact(run_dir: RunDir, facts: dict[str, Any], kind: type[Any], name: str) -> Any:
    if facts.get(name) is None:
        return None
    return from_data(kind, facts[name], locate=lambda place: "/".join((f"{run_dir.facts}: /{name}", *map(str, place))))


def _tokens_per_step(c: Configuration, num_gpus: int) -> float:
    """Returns the planned tokens of a step on all GPUs."""
    return c.batch.tokens * c.step.grad_accum * num_gpus / (c.parallel.sp * c.parallel.tp)


def _slowed(run_dir: RunDir, found: Measurement) -> Iterator[str]:
    """Yields why the step time of a run is not that of its machine."""
    if found.windows < FEWEST_WINDOWS or found.steps < FEWEST_STEPS:
        few = f"{counted(found.steps, 'step')} in {counted(found.windows, 'window')}"
        yield f"{few} after those that warm up are too few"
    if found.data_wait_share > MOST_DATA_WAIT:
        yield f"it waited for data for {found.data_wait_share:.0%} of the time"
    marks = {line["rule"]: line.get("step") for line in read_jsonl(run_dir.health) if line.get("rule") in SLOWED}
    for rule, step in marks.items():
        if rule != HealthRule.DATA_WAIT or found.data_wait_share <= MOST_DATA_WAIT:
            yield f"health rule {rule} at step {step}"
