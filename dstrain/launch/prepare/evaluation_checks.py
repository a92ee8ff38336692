"""Checks the keys of a job that need evaluations: their data, their intervals, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Interval
from dstrain.errors import InvalidConfig
from dstrain.facts.data.mixture import held_out_counts
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare.job_context import sizes_of

_DATA = "Set eval_data to the evaluation data or val_split to a share of data"


def check_evaluation(file: JobFile) -> None:
    """Raises InvalidConfig for keys that need evaluation data or intervals which the job lacks.

    The rows of data files are counted if some are held out.
    """
    for error in without_evaluation(file):
        raise error


def without_evaluation(file: JobFile) -> Iterator[InvalidConfig]:
    """Yields an error at each key that needs evaluation data or intervals which the job lacks."""
    job = file.job
    if job.eval_steps is not None and not job.has_eval:
        problem = f"eval_steps is {job.eval_steps}, but eval_data is not set"
        yield InvalidConfig(problem, place=file.locate(("eval_steps",)), hint=f"{_DATA}, or remove eval_steps.")
    if job.val_split is not None and job.eval_data is not None:
        problem = f"val_split is {job.val_split:g}, but eval_data is set too"
        yield InvalidConfig(problem, place=file.locate(("val_split",)), hint="Remove one of the two.")
    elif job.val_split is not None and (error := _without_split(job, job.val_split)) is not None:
        yield InvalidConfig(error.problem, place=file.locate(("val_split",)), hint=error.hint)
    if job.keeps_best:
        key = "load_best" if job.early_stopping is None else "early_stopping"
        if (fault := _without_best(job, key)) is not None:
            yield InvalidConfig(fault[0], place=file.locate((key,)), hint=fault[1])
    if job.samples is not None and (fault := _without_samples(job)) is not None:
        yield InvalidConfig(fault[0], place=file.locate(("samples",)), hint=fault[1])


def _without_split(job: Job, val_split: float) -> InvalidConfig | None:
    """Returns why no sample is held out or none is left, even if all rows are usable; None if it is not known here."""
    if job.streaming and val_split < 1:
        return None  # a limit of streaming says it
    sizes = sizes_of(job)
    if sizes is None:
        return None
    try:
        held_out_counts(sizes, val_split)
    except InvalidConfig as error:
        return error if sum(sizes) else None
    return None


def _without_best(job: Job, key: str) -> tuple[str, str] | None:
    """Returns why a job has no best checkpoint, and what to write; None if it has one: of each evaluation, at least."""
    if not job.has_eval:
        return f"{key} compares evaluations, but eval_data is not set", f"{_DATA}, or remove {key}."
    needs = f"{key} needs a checkpoint of each evaluation"
    if job.eval_strategy is not job.save_strategy:
        problem = f"{needs}, but eval_strategy is {job.eval_strategy} and save_strategy is {job.save_strategy}"
        return problem, f"save_strategy: {job.eval_strategy}"
    if job.eval_strategy is Interval.EPOCH:
        return None
    if job.eval_steps is None:
        problem = f"{key} compares evaluations, but eval_steps is not set, and the only one is that at the end"
        return problem, f"eval_steps: {job.save_steps}"
    if job.eval_steps == job.save_steps or (job.save_steps >= 1 and job.eval_steps % job.save_steps == 0):
        return None
    problem = f"{needs}, but eval_steps is {job.eval_steps} and save_steps is {job.save_steps}"
    return problem, f"save_steps: {job.eval_steps}"


def _without_samples(job: Job) -> tuple[str, str] | None:
    """Returns why nothing would be generated, and what to write."""
    assert job.samples is not None
    if not job.samples.prompts and not job.samples.eval_prompts:
        return "samples has neither prompts nor eval_prompts", "add prompts: [Who are you?] to samples"
    if job.samples.eval_prompts and not job.has_eval:
        problem = f"samples: eval_prompts is {job.samples.eval_prompts}, but eval_data is not set"
        return problem, f"{_DATA}, or write prompts."
    if job.samples.generate_every is None and not job.has_eval:
        return (
            "samples are generated at each evaluation, but eval_data is not set",
            "add generate_every: 100 to samples, or set eval_data",
        )
    return None


def unplanned(job: Job) -> list[str]:
    """Returns notes about what the planned time of a run does not know."""
    notes = []
    if job.early_stopping is not None:
        notes.append(
            "early_stopping may end the run before its last step: planned times are those of all steps, "
            f"for which the learning rate ({job.lr_scheduler_type}) is scheduled, too"
        )
    if job.samples is not None:
        notes.append("the time of generated samples is not planned; the log has what they take")
    return notes
