"""Rules about numbers that contradict each other or the length of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from dstrain.config.document import dotted, lookup
from dstrain.config.jsonc import Pointer
from dstrain.config.keys.table import key_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.batch import TRAINER_STOPS
from dstrain.config.lint.subject import Subject, is_count, is_number, params_of, type_of
from dstrain.config.resolve_auto import filled
from dstrain.units import counted

_SAMPLING = "data_efficiency.data_sampling."
_LTD = "data_efficiency.data_routing.random_ltd."
_ORDERED: Mapping[str, str] = MappingProxyType(
    {
        "scheduler.params.warmup_min_lr": "warmup_max_lr",
        "scheduler.params.warmup_num_steps": "total_num_steps",
        "scheduler.params.cycle_min_lr": "cycle_max_lr",
        "scheduler.params.cycle_min_mom": "cycle_max_mom",
        "scheduler.params.base_lr": "max_lr",
        "scheduler.params.base_momentum": "max_momentum",
        "optimizer.params.min_coeff": "max_coeff",
        "autotuning.start_profile_step": "end_profile_step",
        "autotuning.min_train_batch_size": "max_train_batch_size",
        "autotuning.min_train_micro_batch_size_per_gpu": "max_train_micro_batch_size_per_gpu",
        _SAMPLING + "curriculum_learning.curriculum_metrics.*.min_difficulty": "max_difficulty",
        _SAMPLING + "dynamic_batching.min_batch_size": "max_batch_size",
        _LTD + "random_ltd_layer_num": "total_layer_num",
        _LTD + "random_ltd_schedule.min_value": "max_value",
    }
)
"""The path of a lower bound → the name of its upper bound in the same object."""
_EFFECTS: Mapping[str, str] = MappingProxyType(
    {
        "warmup_num_steps": "the schedule ends before the warm-up, so the run never reaches the learning rate",
        "warmup_min_lr": "the learning rate falls during the warm-up instead of rising",
        "cycle_min_lr": "the cycle is inverted: the learning rate falls first and then rises",
        "base_lr": "the cycle is inverted: the learning rate falls first and then rises",
    }
)
_LENGTHS: Mapping[str, str] = MappingProxyType(
    {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}
)
"""Schedule → the parameter with its length in steps."""
_AFTER_END: Mapping[str, str] = MappingProxyType(
    {
        "CosineAnnealingLR": "the learning rate then rises again",
        "OneCycleLR": "the run then stops with a ValueError",
    }
)


def _number(subject: Subject, pointer: Pointer) -> float | None:
    """Returns the number at a place: the written one, the job's for "auto", or the engine's default."""
    value, row = lookup(subject.config, pointer), key_of(pointer)
    if value == "auto" and subject.job is not None:
        value = filled(subject.job.job, None, num_ranks=subject.num_ranks).get(pointer)
    elif not subject.has(dotted(pointer)) and row is not None:
        value = row.default
    return value if is_number(value) else None


def _inverted(subject: Subject) -> Iterator[Fault]:
    for outer in [(), *(pointer for pointer, value in subject.walk() if isinstance(value, dict))]:
        section = key_of(outer)
        for path, upper in _ORDERED.items():
            above, lower = path.rsplit(".", 1)
            if section is None or section.path != above:
                continue
            low, high = (_number(subject, (*outer, name)) for name in (lower, upper))
            given = [name for name in (lower, upper) if lookup(subject.config, (*outer, name)) in (low, high)]
            if low is not None and high is not None and low > high and given and _is_taken(subject, outer, given):
                yield Fault(
                    pointer=(*outer, given[0]),
                    severity=None if lower in _EFFECTS else Severity.WARNING,
                    problem=f"{lower} is {low:g}, but {upper} is {high:g}",
                    effect=_EFFECTS.get(lower, "the range is empty: its lower bound is above its upper bound"),
                    fix=f"write a {lower} of at most {upper}",
                )


def _is_taken(subject: Subject, outer: Pointer, names: list[str]) -> bool:
    """Returns whether the schedule or optimizer has these parameters."""
    return outer[-1:] != ("params",) or params_of(subject, str(outer[0])).keys() >= {*names}


def _longer_than_the_run(subject: Subject) -> Iterator[Fault]:
    """Reports lengths of a schedule that contradict the steps of the job; the Trainer compares two of them."""
    if subject.job is None:
        return
    job, locate = subject.job.job, subject.job.locate
    steps, says = job.max_steps, f"{locate(('max_steps',))}: max_steps is {job.max_steps}"
    if steps is None and subject.counted_steps is not None:
        steps, says = subject.counted_steps, f"{locate(('data',))}: data has rows for {subject.counted_steps} steps"
    params = params_of(subject, "scheduler")
    warmup, reason = job.warmup_steps, f"{locate(('warmup_steps',))}: warmup_steps"
    if warmup is None and steps is not None:
        warmup, reason = math.ceil(steps * job.warmup_ratio), f"{says} (warmup_ratio {job.warmup_ratio:g})"
    counts = {"warmup_num_steps": (warmup, reason), "total_num_steps": (steps, says)}
    for key, (count, source) in counts.items():
        value = params.get(key)
        if count is not None and is_count(value) and value != max(1, count) and subject.is_trainers:
            yield Fault(
                pointer=("scheduler", "params", key),
                problem=f"{key} is {value}, but {source} makes it {max(1, count)}",
                effect=TRAINER_STOPS,
                fix=f'write "auto" here, or {_JOB_KEYS[key]}: {value} into job.yaml',
            )
    name = type_of(subject, "scheduler") or ""
    key = _LENGTHS.get(name, "")
    length = params.get(key)
    if steps is not None and length is not None and is_count(length) and length < steps:
        yield Fault(
            pointer=("scheduler", "params", key),
            severity=Severity.WARNING if name == "CosineAnnealingLR" else None,
            problem=f"{name} ends after {counted(length, 'step')}, but {says}",
            effect=_AFTER_END.get(name, "the learning rate is then 0"),
            fix=f"write {steps}",
        )


_JOB_KEYS = {"warmup_num_steps": "warmup_steps", "total_num_steps": "max_steps"}
"""Lengths that the Trainer compares → the key of the job."""
_CURVES = "deepspeed 0.19.8 runtime/lr_schedules.py; torch 2.13 optim/lr_scheduler.py"

# fmt: off
RULES = (
    Rule(id="DS420", severity=Severity.ERROR, title="lower bound above upper bound", find=_inverted, source=_CURVES),
    Rule(id="DS421", severity=Severity.ERROR, title="schedule with another length than the run",
         find=_longer_than_the_run, source=_CURVES),
)
"""Rules about numbers that contradict each other."""
# fmt: on
