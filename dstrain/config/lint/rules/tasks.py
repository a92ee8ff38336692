"""Rules about the task of a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dstrain.choices import Method
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject
from dstrain.facts.model.parameter_names import names_of
from dstrain.facts.model.vision_towers import TRAINS_VIDEOS
from dstrain.job import task_limits
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.named_parts import unknown

_STOPS = "the run stops before it loads the model"
_STOPS_LOADED = "the run stops once the model is loaded"
_OF_IMAGES = ("max_pixels", "min_pixels", "image_patches")
_OF_VIDEOS = ("video_max_pixels", "video_fps", "video_maxlen")
_MAY_STOP = "the run stops once the model is loaded if it has no such names"


def _not_of_task(subject: Subject) -> Iterator[Fault]:
    """Reports keys of the job that its task does not support."""
    for limit, problem in task_limits.broken(subject.job.job) if subject.job is not None else ():
        yield in_job(subject, limit.key, problem, _STOPS, limit.fix)


def _unused_smoothing(subject: Subject) -> Iterator[Fault]:
    job = subject.asked
    if job is not None and task_limits.is_smoothing_unused(job):
        problem = f"label_smoothing is {job.dpo.label_smoothing:g}, but loss_type is {job.dpo.loss_type}"
        yield in_job(subject, "dpo", problem, "it changes nothing", "write loss_type: robust, or remove it")


def _without_tower(subject: Subject) -> Iterator[Fault]:
    """Reports keys of images, videos and towers in the job of a language model."""
    if subject.job is None or subject.model is None or subject.model.has_tower:
        return
    given, plain = subject.job.job, Job(model="", output_dir="")
    for key in (*_OF_IMAGES, *_OF_VIDEOS, *(limit.key for limit in task_limits.WITH_ADAPTERS)):
        value = getattr(given, key)
        if value != getattr(plain, key):
            problem = f"{key} is {task_limits.shown(value)}, but {subject.model.name} has no tower"
            yield in_job(subject, key, problem, "it changes nothing, or stops the run", "remove the key")


def _of_videos(subject: Subject) -> Iterator[Fault]:
    """Reports keys of videos in the job of a model with a tower that does not train on them."""
    if subject.job is None or subject.model is None or not subject.model.has_tower:
        return
    given, family = subject.job.job, subject.model.model_type
    for key in _OF_VIDEOS if family not in TRAINS_VIDEOS else ():
        if getattr(given, key):
            problem = f"{key} is {task_limits.shown(getattr(given, key))}, but {family} does not train on videos"
            yield in_job(subject, key, problem, "it changes nothing", "remove the key")


def _named_in_vain(subject: Subject) -> Iterator[Fault]:
    """Reports patterns of parameters and modules of an adapter that are in no name of the model."""
    job = subject.asked
    given = _named_keys(job) if job is not None else []
    if subject.job is None or job is None or not given:
        return
    names = names_of(subject.model, job.model)
    if names is not None:  # those of files may hold each expert apart
        given = [key for key in given if key.endswith("target_parameters") and subject.model is None]
    if given and (names is None or subject.model is None):
        problem = f"{', '.join(given)} cannot be checked: the names of {job.model}'s parameters are not known here"
        fix = "name a folder with its config.json or its weights to check them before the launch"
        yield replace(in_job(subject, "model", problem, _MAY_STOP, fix), severity=Severity.WARNING)
    if names is None:
        return
    for found in unknown(job, names, subject.model):
        place = subject.job.locate(found.keys)
        yield Fault(place=place, problem=found.problem, effect=_STOPS_LOADED, fix=found.fix)


def _named_keys(job: Job) -> list[str]:
    """Returns the keys of a job that name parameters or modules."""
    if job.method is Method.FULL:
        return [key for key in ("freeze", "train_only") if getattr(job, key)]
    plain = Lora()
    keys = ("targets", "target_parameters", "modules_to_save")
    return [f"lora: {key}" for key in keys if getattr(job.lora, key) != getattr(plain, key)]


RULES = (
    Rule(
        id="DS226",
        severity=Severity.ERROR,
        title="key that the task or the method does not support",
        find=_not_of_task,
        source="dstrain/job/task_limits.py",
    ),
    Rule(
        id="DS227",
        severity=Severity.ERROR,
        title="name not found in the model",
        find=_named_in_vain,
        source="dstrain/train/model_parts.py; peft 0.21 tuners/tuners_utils.py: check_target_module_exists",
    ),
    Rule(
        id="DS908",
        severity=Severity.WARNING,
        title="label smoothing without effect on this loss",
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
    Rule(
        id="DS911",
        severity=Severity.WARNING,
        title="key of videos for a family that does not train on them",
        find=_of_videos,
        source="dstrain/facts/model/vision_towers.py: TRAINS_VIDEOS",
    ),
)
"""Rules about the task."""
