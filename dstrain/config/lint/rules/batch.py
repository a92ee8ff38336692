"""Rules about batch sizes and settings shared with the job: accumulation, clipping, learning rate, precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

from dstrain.config.document import dotted, lookup
from dstrain.config.jsonc import Pointer
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule, when
from dstrain.config.lint.subject import ABSENT, Subject, shown
from dstrain.config.resolve_auto import filled

_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _sections(subject: Subject) -> Iterator[Fault]:
    if subject.is_trainers and not subject.has("zero_optimization"):
        yield Fault(
            problem="zero_optimization is missing",
            effect="accelerate ends the run: it asks for the section, even for ZeRO-0",
            fix='write "zero_optimization": {"stage": 2}',
        )


def auto_fix(subject: Subject, name: str, key: str) -> str:
    """Returns how to let the Trainer fill a key, with what the job says where there is one."""
    said = ""
    if subject.job is not None:
        said = f", which is {key} of {subject.job.locate((key,))}: {shown(getattr(subject.job.job, key))}"
    return f'write "{name}": "auto"{said}'


def _clipping(subject: Subject) -> Iterator[Fault]:
    if subject.is_trainers and not subject.has("gradient_clipping"):
        yield Fault(
            problem="gradient_clipping is missing",
            effect="the Trainer fills only keys that are there: DeepSpeed clips at its own 1.0, whatever max_grad_norm "
            "says; dstrain run adds the key",
            fix='write "gradient_clipping": "auto"',
        )


def _accumulation(subject: Subject) -> Iterator[Fault]:
    """accelerate puts 1, and the number that the Trainer made of the job's accumulation stands in train_batch_size."""
    if not subject.is_trainers or subject.has("gradient_accumulation_steps"):
        return
    effect = "accelerate makes it 1: where gradients are accumulated, DeepSpeed averages and reports too few samples"
    if subject.has("train_batch_size"):
        effect = (
            "accelerate makes it 1: where gradients are accumulated, train_batch_size is then no longer "
            "micro-batch × 1 × ranks, and the run ends when the engine starts (AssertionError)"
        )
    accumulates = subject.job is not None and subject.job.job.grad_accum > 1
    yield Fault(
        problem="gradient_accumulation_steps is missing"
        + (" beside train_batch_size" if subject.has("train_batch_size") else ""),
        severity=Severity.ERROR if accumulates and subject.has("train_batch_size") else None,
        effect=effect,
        fix=auto_fix(subject, "gradient_accumulation_steps", "grad_accum"),
    )


def _micro_batch(subject: Subject) -> Iterator[Fault]:
    if subject.has("train_batch_size") or subject.has("train_micro_batch_size_per_gpu") or subject.job is not None:
        return  # dstrain run adds it
    yield Fault(
        problem="neither train_batch_size nor train_micro_batch_size_per_gpu is given",
        effect="DeepSpeed refuses the configuration",
        fix='write "train_micro_batch_size_per_gpu": ' + ('"auto"' if subject.is_trainers else "1"),
    )


def _identity(subject: Subject) -> Iterator[Fault]:
    """train_batch_size = micro-batch × accumulation × ranks; those of sequence parallelism share their samples.

    AutoTP's ranks do so too, and the engine counts them all the same: it checks before it makes their groups.
    """
    batch = subject.at("train_batch_size", None)
    given = [subject.at(key, None) for key in _BATCH]
    factors = [each for each in given if is_count(each)]
    if not is_count(batch) or not factors:
        return
    ranks = _data_ranks(subject)
    per_rank, is_whole = prod(factors), len(factors) == len(_BATCH)
    if ranks is None:
        if batch % per_rank == 0:
            return
        said = f"{batch}, no multiple of {' × '.join(map(str, factors))}"
    else:
        if batch == per_rank * ranks or (not is_whole and batch % (per_rank * ranks) == 0 and batch > 0):
            return
        sign = "≠" if is_whole else "no multiple of"
        said = f"{batch} {sign} {' × '.join(map(str, factors))} × {ranks} data-parallel ranks"
    yield Fault(
        pointer=("train_batch_size",),
        problem=f"train_batch_size is {said}",
        effect="DeepSpeed refuses the configuration when the engine starts",
        fix='write "train_batch_size": "auto"' if subject.is_trainers else "remove the line: DeepSpeed computes it",
    )


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _data_ranks(subject: Subject) -> int | None:
    if subject.num_ranks is None:
        return None
    return max(1, subject.num_ranks // max(1, int(subject.number("sequence_parallel_size", 1))))


def _is_tp_times(s: Subject) -> bool:
    return s.is_trainers and s.at("train_batch_size", None) == "auto" and s.number("tensor_parallel.autotp_size", 0) > 1


JOB_KEYS: Mapping[Pointer, str] = MappingProxyType(
    {
        ("train_micro_batch_size_per_gpu",): "micro_batch",
        ("gradient_accumulation_steps",): "grad_accum",
        ("train_batch_size",): "micro_batch",
        ("gradient_clipping",): "max_grad_norm",
        ("bf16", "enabled"): "precision",
        ("fp16", "enabled"): "precision",
        ("optimizer", "params", "lr"): "learning_rate",
        ("optimizer", "params", "betas"): "adam_beta1",
        ("optimizer", "params", "weight_decay"): "weight_decay",
        ("optimizer", "params", "eps"): "adam_epsilon",
        ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    }
)
"""What the Trainer compares with its arguments → the job's key."""


def _disagreements(subject: Subject) -> Iterator[Fault]:
    """A literal that contradicts the job. null contradicts too: the Trainer leaves it, and DeepSpeed takes its own."""
    if subject.job is None:
        return
    for pointer, wanted in filled(subject.job.job, None, num_ranks=subject.num_ranks).items():
        value, key = lookup(subject.config, pointer), JOB_KEYS.get(pointer)
        if key is None or value is ABSENT or value == "auto" or agrees(value, wanted):
            continue
        what = shown(wanted)
        if pointer == ("train_batch_size",):
            job = subject.job.job
            what = f"{job.micro_batch} × {job.grad_accum} × {subject.num_ranks} GPUs = {wanted}"
        elif pointer[-1] == "betas":
            what += " (with adam_beta2)"
        yield Fault(
            pointer=pointer,
            problem=f"{dotted(pointer)} is {shown(value)}, and {subject.job.locate((key,))}: {key} makes it {what}",
            effect="the Trainer ends the run after the model was loaded",
            fix='write "auto" here to mean the job, or change the job',
        )


def agrees(value: Any, wanted: Any) -> bool:
    """Returns whether a literal is the job's value; true is not 1.

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

RULES = (
    Rule(
        id="DS401",
        severity=Severity.ERROR,
        title="zero_optimization is missing",
        find=_sections,
        source="accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.__post_init__",
    ),
    Rule(id="DS402", severity=Severity.WARNING, title="gradient_clipping is missing", find=_clipping, source=_HF),
    Rule(
        id="DS403",
        severity=Severity.WARNING,
        title="gradient_accumulation_steps is missing",
        find=_accumulation,
        source="accelerate 1.15 utils/dataclasses.py: DeepSpeedPlugin.__post_init__",
    ),
    Rule(
        id="DS404",
        severity=Severity.ERROR,
        title="no batch size",
        find=_micro_batch,
        source=_DS + "_set_batch_related_parameters",
    ),
    Rule(
        id="DS405", severity=Severity.ERROR, title="the batch identity", find=_identity, source=_DS + "_batch_assertion"
    ),
    Rule(
        id="DS406",
        severity=Severity.INFO,
        title="the batch under tensor parallelism",
        find=when(
            "train_batch_size",
            _is_tp_times,
            problem='train_batch_size is "auto" beside tensor_parallel',
            effect="DeepSpeed counts every GPU: the batch that it reports is autotp_size times the samples of a step",
            fix="leave it, and divide what is reported",
        ),
        source=_HF,
    ),
    Rule(
        id="DS410",
        severity=Severity.ERROR,
        title="a value that contradicts the job",
        find=_disagreements,
        source="Transformers 5.23 integrations/deepspeed.py: trainer_config_finalize",
    ),
)
"""Rules about the batch and the job."""
