"""Rules about the task of a job."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject
from dstrain.facts.model.model_facts import why_unscored
from dstrain.job import task_limits
from dstrain.job.schema import Job

_STOPS = "the run stops before it loads the model"


def _not_of_task(subject: Subject) -> Iterator[Fault]:
    """Reports keys of the job that its task does not support."""
    for limit, problem in task_limits.broken(subject.job.job) if subject.job is not None else ():
        yield in_job(subject, limit.key, problem, _STOPS, f"write {limit.instead}")
    if subject.job is None or subject.model is None or not subject.job.job.task.has_score:
        return
    if (why := why_unscored(subject.model)) is not None:
        yield in_job(subject, "task", f"task is reward, but {why}", _STOPS, "name another model")


def _unused_smoothing(subject: Subject) -> Iterator[Fault]:
    job = subject.job.job if subject.job is not None else None
    if job is not None and task_limits.is_smoothing_unused(job):
        problem = f"label_smoothing is {job.dpo.label_smoothing:g}, but loss_type is {job.dpo.loss_type}"
        yield in_job(subject, "dpo", problem, "it changes nothing", "write loss_type: robust, or remove it")


def _without_tower(subject: Subject) -> Iterator[Fault]:
    """Reports keys of images and towers in the job of a language model."""
    if subject.job is None or subject.model is None or subject.model.vision is not None:
        return
    given, plain = subject.job.job, Job(model="", output_dir="")
    for key in ("max_pixels", "image_patches", *(limit.key for limit in task_limits.WITH_ADAPTERS)):
        value = getattr(given, key)
        if value != getattr(plain, key):
            problem = f"{key} is {task_limits.shown(value)}, but {subject.model.name} has no vision tower that is known"
            yield in_job(subject, key, problem, "it changes nothing, or stops the run", "remove the key")


RULES = (
    Rule(
        id="DS226",
        severity=Severity.ERROR,
        title="key that the task or the method does not support",
        find=_not_of_task,
        source="dstrain/job/task_limits.py",
    ),
    Rule(
        id="DS908",
        severity=Severity.WARNING,
        title="label smoothing that the loss has not",
        find=_unused_smoothing,
        source="trl 1.16 trainer/dpo_trainer.py: DPOTrainer._compute_loss",
    ),
    Rule(
        id="DS909",
        severity=Severity.WARNING,
        title="key of images or towers for a language model",
        find=_without_tower,
        source="dstrain/train/model_parts.py: freeze",
    ),
)
"""Rules about the task."""
