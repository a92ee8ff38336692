"""Rules about numbers: batch sizes, settings shared with the job, and bounds that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from dstrain.config.jsonc import Pointer, dotted, lookup
from dstrain.config.keys import key_of
from dstrain.config.lint.rule import (
    ABSENT,
    REFUSES,
    Broken,
    Fault,
    Rule,
    Subject,
    fault,
    is_count,
    is_number,
    params_of,
    shown,
    type_of,
    when,
)
from dstrain.config.lint.rules.key_names import is_missing
from dstrain.config.resolve_auto import BATCH_KEYS, JOB_KEYS, filled
from dstrain.findings import Severity
from dstrain.units import counted

TRAINER_STOPS = "the Trainer ends the run after loading the model"
FOLLOW_JOB = 'write "auto" here to use the value of the job, or change the job'


def auto_fix(subject: Subject, name: str, key: str) -> str:
    """Returns the advice to let the Trainer fill a key, with the job's value if there is a job."""
    source = ""
    if subject.job is not None:
        source = f", which is {key} of {subject.job.locate((key,))}: {shown(getattr(subject.job.job, key))}"
    return f'write "{name}": "auto"{source}'


def _accumulation(subject: Subject) -> Iterator[Fault]:
    """Reports a missing key that accelerate sets to 1, while train_batch_size includes the job's accumulation."""
    if not subject.is_trainers or not is_missing(subject, "gradient_accumulation_steps"):
        return
    has_batch = subject.has("train_batch_size")
    effect = "accelerate sets 1: if gradients are accumulated, DeepSpeed averages and reports too few samples"
    if has_batch:
        effect = (
            "accelerate sets 1: if gradients are accumulated, train_batch_size no longer equals "
            "micro-batch × 1 × ranks, and the run stops when the engine starts (AssertionError)"
        )
    accumulates = subject.job is not None and subject.job.job.grad_accum > 1
    yield fault(
        "",
        "gradient_accumulation_steps is missing" + (", but train_batch_size is given" if has_batch else ""),
        effect,
        auto_fix(subject, "gradient_accumulation_steps", "grad_accum"),
        severity=Severity.ERROR if accumulates and has_batch else None,
    )


def _sizeless(s: Subject) -> Broken:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if s.job is not None or not all(is_missing(s, name) for name in sizes):
        return None  # dstrain run adds it
    return {"size": '"auto"' if s.is_trainers else "1"}


def _identity(subject: Subject) -> Iterator[Fault]:
    """Reports a violation of train_batch_size = micro-batch × accumulation × data-parallel ranks.

    Ranks of one sequence-parallel group share their samples. So do AutoTP's, but the engine counts each of them,
    because it checks before it creates the groups.
    """
    batch = subject.at("train_batch_size", None)
    factors = [factor for factor in (subject.at(key, None) for key in BATCH_KEYS) if is_count(factor)]
    if not is_count(batch) or not factors:
        return
    # with a factor or the ranks unknown, only a remainder proves a contradiction
    ranks, is_complete = _data_ranks(subject), len(factors) == len(BATCH_KEYS)
    per_step = prod(factors) * (ranks or 1)
    if batch == per_step or (batch % per_step == 0 and (ranks is None or not is_complete)):
        return
    relation = " ≠" if ranks is not None and is_complete else ", not a multiple of"
    last = [] if ranks is None else [counted(ranks, "data-parallel rank")]
    product = " × ".join([*map(str, factors), *last])
    yield fault(
        "train_batch_size",
        f"train_batch_size is {batch}{relation} {product}",
        f"{REFUSES} when the engine starts",
        'write "train_batch_size": "auto"' if subject.is_trainers else "remove the line: DeepSpeed computes it",
    )


def _data_ranks(subject: Subject) -> int | None:
    if subject.num_ranks is None:
        return None
    if subject.job is not None:
        return subject.job.job.data_parallel(subject.num_ranks)
    return max(1, subject.num_ranks // max(1, int(subject.number("sequence_parallel_size", 1))))


def _counts_tp_ranks(s: Subject) -> bool:
    is_auto = s.is_trainers and bool(s.at("train_batch_size", None) == "auto")
    return is_auto and s.number("tensor_parallel.autotp_size", 1) > 1


def _disagreements(subject: Subject) -> Iterator[Fault]:
    """Reports literals that contradict the job; so does null, which makes DeepSpeed use its own default."""
    if subject.job is None:
        return
    for pointer, wanted in filled(subject.job.job, None, num_ranks=subject.num_ranks).items():
        value, key = lookup(subject.config, pointer), JOB_KEYS.get(pointer)
        if key is None or value is ABSENT or value == "auto" or agrees(value, wanted):
            continue
        text = shown(wanted) + (" (with adam_beta2)" if pointer[-1] == "betas" else "")
        if pointer == ("train_batch_size",):
            job = subject.job.job
            shared = "".join(f" ÷ {key} {size}" for key, size in (("sp", job.sp), ("tp", job.tp)) if size > 1)
            text = f"{job.micro_batch} × {job.grad_accum} × {subject.num_ranks} GPUs{shared} = {wanted}"
        problem = f"{dotted(pointer)} is {shown(value)}, but {subject.job.locate((key,))}: {key} makes it {text}"
        yield fault(pointer, problem, TRAINER_STOPS, FOLLOW_JOB)


def agrees(value: Any, wanted: Any) -> bool:
    """Returns whether a literal equals the job's value; true does not equal 1.

    >>> agrees(1, 1.0), agrees(True, 1.0), agrees([0.9, 0.999], [0.9, 0.999])
    (True, False, True)
    """
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(agrees, value, wanted))
    return bool(value == wanted)


_HF = "Transformers 5.23 integrations/deepspeed.py: trainer_config_process"
_DS = "deepspeed 0.19.8 runtime/config.py: "
_PLUGIN = "accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.__post_init__"
_E, _W = Severity.ERROR, Severity.WARNING


_SAMPLING = "data_efficiency.data_sampling."
_LTD = "data_efficiency.data_routing.random_ltd."
_ORDERED: Mapping[str, str] = {
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
"""The path of a lower bound → the name of its upper bound in the same object."""
_EFFECTS: Mapping[str, str] = {
    "warmup_num_steps": "the schedule ends before the warm-up, so the run never reaches the learning rate",
    "warmup_min_lr": "the learning rate falls during the warm-up instead of rising",
    "cycle_min_lr": "the cycle is inverted: the learning rate falls first and then rises",
    "base_lr": "the cycle is inverted: the learning rate falls first and then rises",
}
_LENGTHS: Mapping[str, str] = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}
"""Schedule → the parameter with its length in steps."""
_AFTER_END: Mapping[str, str] = {
    "CosineAnnealingLR": "the learning rate then rises again",
    "OneCycleLR": "the run then stops with a ValueError",
}


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
            # two defaults may contradict each other without anyone's doing: one of the numbers must be written
            given = [name for name in (lower, upper) if lookup(subject.config, (*outer, name)) in (low, high)]
            if low is not None and high is not None and low > high and given and _is_taken(subject, outer, given):
                yield fault(
                    (*outer, given[0]),
                    f"{lower} is {low:g}, but {upper} is {high:g}",
                    _EFFECTS.get(lower, "the range is empty: its lower bound is above its upper bound"),
                    f"write a {lower} of at most {upper}",
                    severity=None if lower in _EFFECTS else Severity.WARNING,
                )


def _is_taken(subject: Subject, outer: Pointer, names: list[str]) -> bool:
    """Returns whether the schedule or optimizer has these parameters."""
    return outer[-1:] != ("params",) or params_of(subject, str(outer[0])).keys() >= {*names}


def _longer_than_the_run(subject: Subject) -> Iterator[Fault]:
    """Reports lengths of a schedule that contradict the steps of the job; the Trainer compares two of them."""
    if subject.job is None:
        return
    job, locate = subject.job.job, subject.job.locate
    # max_steps wins over the rows of the data, and warmup_steps over warmup_ratio, as in the Trainer
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
            problem = f"{key} is {value}, but {source} makes it {max(1, count)}"
            fix = f'write "auto" here, or {_JOB_KEYS[key]}: {value} into job.yaml'
            yield fault(("scheduler", "params", key), problem, TRAINER_STOPS, fix)
    name = type_of(subject, "scheduler") or ""
    key = _LENGTHS.get(name, "")
    length = params.get(key)
    if steps is not None and length is not None and is_count(length) and length < steps:
        yield fault(
            ("scheduler", "params", key),
            f"{name} ends after {counted(length, 'step')}, but {says}",
            _AFTER_END.get(name, "the learning rate is then 0"),
            f"write {steps}",
            severity=Severity.WARNING if name == "CosineAnnealingLR" else None,
        )


_JOB_KEYS = {"warmup_num_steps": "warmup_steps", "total_num_steps": "max_steps"}
"""Lengths that the Trainer compares → the key of the job."""
_CURVES = "deepspeed 0.19.8 runtime/lr_schedules.py; torch 2.13 optim/lr_scheduler.py"


# fmt: off
RULES = (
    Rule(id="DS401", severity=_E, title="missing zero_optimization",
         find=when("", lambda s: s.is_trainers and is_missing(s, "zero_optimization"),
                   problem="zero_optimization is missing",
                   effect="accelerate ends the run: it requires the section, even for ZeRO-0",
                   fix='write "zero_optimization": {{"stage": 2}}'),
         source=_PLUGIN),
    Rule(id="DS402", severity=_W, title="missing gradient_clipping",
         find=when("", lambda s: s.is_trainers and is_missing(s, "gradient_clipping"),
                   problem="gradient_clipping is missing",
                   effect="the Trainer fills only existing keys, so DeepSpeed clips at its own 1.0 and ignores "
                          "max_grad_norm; dstrain run adds the key",
                   fix='write "gradient_clipping": "auto"'),
         source=_HF),
    Rule(id="DS403", severity=_W, title="missing gradient_accumulation_steps", find=_accumulation, source=_PLUGIN),
    Rule(id="DS404", severity=_E, title="missing batch size",
         find=when("", _sizeless, problem="train_batch_size and train_micro_batch_size_per_gpu are both missing",
                   effect=REFUSES, fix='write "train_micro_batch_size_per_gpu": {size}'),
         source=_DS + "_set_batch_related_parameters"),
    Rule(id="DS405", severity=_E, title="batch sizes that contradict each other", find=_identity,
         source=_DS + "_batch_assertion"),
    Rule(id="DS406", severity=Severity.INFO, title="batch size under tensor parallelism",
         find=when("train_batch_size", _counts_tp_ranks, problem='train_batch_size is "auto" with tensor_parallel',
                   effect="DeepSpeed counts every GPU: it reports autotp_size times the samples of a step",
                   fix="leave it, and divide the reported batch size"),
         source=_HF),
    Rule(id="DS410", severity=_E, title="value that contradicts the job", find=_disagreements,
         source="Transformers 5.23 integrations/deepspeed.py: trainer_config_finalize"),
    Rule(id="DS420", severity=_E, title="lower bound above upper bound", find=_inverted, source=_CURVES),
    Rule(id="DS421", severity=_E, title="schedule with another length than the run",
         find=_longer_than_the_run, source=_CURVES),
)
"""Rules about numbers."""
# fmt: on
