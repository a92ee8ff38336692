"""Parts of a vision-language model: tower, aligner and language model, and which of them train."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.model.parts import Part, part_of
from dstrain.job.schema import Job
from dstrain.plan import freezing
from dstrain.plan.named_parts import unknown


def freeze(model: Any, job: Job) -> None:
    """Freezes the parts of a vision-language model that a job does not train; a language model stays as it is.

    Raises InvalidConfig if a job freezes the whole model.
    """
    has_tower = any(part_of(name) is Part.TOWER for name, _ in model.named_parameters())
    parts = freezing.frozen_parts(job)
    if job.freeze_language_model and (not has_tower or len(parts) == len(Part)):
        raise InvalidConfig("freeze_language_model leaves nothing to train", hint="freeze_language_model: false")
    freeze_parts(model, parts)
    _freeze_by_name(model, job)


def _freeze_by_name(model: Any, job: Job) -> None:
    """Freezes the parameters that a job names.

    Raises InvalidConfig for a name that the model does not have, and if nothing is left to train.
    """
    for missing in unknown(job, [name for name, _ in model.named_parameters()]):
        raise InvalidConfig(missing.problem, hint=f"{missing.fix[0].upper()}{missing.fix[1:]}.")
    for name, parameter in model.named_parameters():
        if freezing.is_frozen(name, freeze=job.freeze, train_only=job.train_only):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidConfig("freeze and train_only leave nothing to train", hint="Remove one of the patterns.")


def freeze_parts(model: Any, parts: Collection[Part]) -> None:
    """Freezes parts of a vision-language model; nothing in a language model."""
    named = [(part_of(name), parameter) for name, parameter in model.named_parameters()]
    has_tower = any(part is Part.TOWER for part, _ in named)
    for part, parameter in named:
        if has_tower and part in parts:
            parameter.requires_grad_(False)
