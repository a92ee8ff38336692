"""Rules about single keys of the job: those that nothing reads, and values that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dstrain.choices import Interval, Method, Optimizer, Task
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject
from dstrain.job.schema import Job
from dstrain.job.task_limits import shown

_PLAIN = Job(model="", output_dir="")
_NO_EVALUATION = "there are no evaluation data"
LARGEST_RATE = 0.1
"""Learning rate from which lint warns, which is a judgement: Muon's own default is 0.02, AdamW's 0.001."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """A key of the job that is read only beside another one."""

    key: str
    is_read: Callable[[Job], bool]
    """Whether the job reads it."""
    otherwise: str
    """Why it does not, as the end of a sentence."""


def _of_answers(key: str) -> Dependence:
    why = "task is pretrain, whose texts have no turns"
    return Dependence(key=key, is_read=lambda job: job.task is not Task.PRETRAIN, otherwise=why)


def _of_evaluation(key: str) -> Dependence:
    return Dependence(key=key, is_read=lambda job: job.has_eval, otherwise=_NO_EVALUATION)


def _with(key: str, switch: str, wanted: object, otherwise: str) -> Dependence:
    return Dependence(key=key, is_read=lambda job: getattr(job, switch) == wanted, otherwise=otherwise)


DEPENDENCES = (
    _with("dpo", "task", Task.DPO, "task is not dpo"),
    *(_of_answers(key) for key in ("loss_on", "system", "thinking")),
    *(_of_evaluation(key) for key in ("eval_strategy", "eval_on_start", "eval_micro_batch")),
    _with("eval_steps", "eval_strategy", Interval.STEPS, "eval_strategy is epoch"),
    Dependence(key="lora", is_read=lambda job: job.method is not Method.FULL, otherwise="method is full"),
    _with("shuffle_buffer", "streaming", True, "streaming is false"),
    Dependence(
        key="stopping_strategy",
        is_read=lambda job: any(source.weight is not None for source in job.train_sources),
        otherwise="no data set has a weight",
    ),
    _with("muon_learning_rate", "optimizer", Optimizer.MUON, "optimizer is not muon"),
    _with("torch_compile_backend", "torch_compile", True, "torch_compile is false"),
    _with("warmup_ratio", "warmup_steps", None, "warmup_steps is set, in its place"),
    Dependence(
        key="early_stopping_threshold",
        is_read=lambda job: job.early_stopping is not None,
        otherwise="early_stopping is not set",
    ),
)
"""Keys that are read only beside others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A key of the job whose value makes no sense under a condition."""

    key: str
    """Dotted, if it is in a section."""
    is_odd: Callable[[Job], bool]
    than: Callable[[Job], str]
    """The contradicted setting, as the end of a sentence."""
    effect: str
    fix: str


BOUNDS = (
    Bound(
        key="warmup_steps",
        is_odd=lambda job: job.max_steps is not None and (job.warmup_steps or 0) >= job.max_steps,
        than=lambda job: f"max_steps is {job.max_steps}",
        effect="the learning rate never gets to its peak",
        fix="write fewer than max_steps",
    ),
    Bound(
        key="new_tokens",
        is_odd=lambda job: len(set(job.new_tokens)) < len(job.new_tokens),
        than=lambda job: "one of them is there twice",
        effect="it is added once",
        fix="remove the second one",
    ),
    Bound(
        key="samples.max_new_tokens",
        is_odd=lambda job: job.samples is not None and job.samples.max_new_tokens > job.seq_len,
        than=lambda job: f"seq_len is {job.seq_len}",
        effect="texts may be longer than any of the training, and each of their tokens takes a forward pass",
        fix="write seq_len at most",
    ),
    Bound(
        key="min_pixels",
        is_odd=lambda job: (job.min_pixels or 0) > (job.max_pixels or job.min_pixels or 0),
        than=lambda job: f"max_pixels is {job.max_pixels}",
        effect="images are made smaller, then larger again",
        fix="write max_pixels at most",
    ),
    Bound(
        key="learning_rate",
        is_odd=lambda job: job.learning_rate > LARGEST_RATE,
        than=lambda job: f"rates above {LARGEST_RATE} are too large for {job.optimizer}",
        effect="the loss diverges in the first steps",
        fix="write 1e-5 (full) or 1e-4 (lora), or leave it out",
    ),
)
"""Values that make no sense."""


def _value(job: Any, key: str) -> Any:
    """Returns the value of a dotted key."""
    for name in key.split("."):
        job = getattr(job, name)
    return job


def _unread(subject: Subject) -> Iterator[Fault]:
    """Reports keys of the job that differ from their default, but that nothing reads."""
    if subject.job is None:
        return
    job = subject.job.job
    for row in DEPENDENCES:
        value = getattr(job, row.key)
        if value != getattr(_PLAIN, row.key) and not row.is_read(job):
            problem = f"{row.key} is {shown(value)}, but {row.otherwise}"
            yield in_job(subject, row.key, problem, "it is not read", "remove it")


def _odd(subject: Subject) -> Iterator[Fault]:
    """Reports values of the job that make no sense."""
    if subject.job is None:
        return
    job = subject.job.job
    for row in BOUNDS:
        if row.is_odd(job):
            problem = f"{row.key} is {shown(_value(job, row.key))}, but {row.than(job)}"
            yield in_job(subject, row.key, problem, row.effect, row.fix)


RULES = (
    Rule(
        id="DS907",
        severity=Severity.WARNING,
        title="key of the job that is not read",
        find=_unread,
        source="dstrain/config/lint/rules/job_keys.py: DEPENDENCES",
    ),
    Rule(
        id="DS912",
        severity=Severity.WARNING,
        title="value of the job that makes no sense",
        find=_odd,
        source="dstrain/config/lint/rules/job_keys.py: BOUNDS",
    ),
)
"""Rules about single keys of the job."""
