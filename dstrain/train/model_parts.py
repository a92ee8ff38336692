"""Parts of a vision-language model: tower, aligner and language model, and which of them train."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.plan import freezing

VISION = frozenset({"visual", "vision_tower", "vision_model"})
"""Module names of the vision tower in Transformers' vision-language models."""
_ALIGNER = frozenset({"merger", "deepstack_merger_list", "multi_modal_projector", "aligner", "connector"})
"""Module names of what joins tower and language model; in Qwen's models it is a part of the tower's module."""


class Part(StrEnum):
    """A part of a vision-language model."""

    TOWER = "vision tower"
    ALIGNER = "multi-modal projector"
    LANGUAGE_MODEL = "language model"


def is_vision(name: str) -> bool:
    """Returns whether a module or parameter belongs to a vision tower, or to an aligner within it."""
    return not VISION.isdisjoint(name.split("."))


def part_of(name: str) -> Part:
    """Returns the part to which a parameter belongs.

    >>> part_of("model.visual.merger.norm.weight").value, part_of("model.visual.blocks.0.norm1.weight").value
    ('multi-modal projector', 'vision tower')
    """
    if not _ALIGNER.isdisjoint(name.split(".")):
        return Part.ALIGNER
    return Part.TOWER if is_vision(name) else Part.LANGUAGE_MODEL


def freeze(model: Any, job: Job) -> None:
    """Freezes the parts of a vision-language model that a job does not train; a language model stays as it is.

    Raises InvalidConfig if a job freezes the whole model.
    """
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    has_tower = Part.TOWER in parts.values()
    is_frozen = {
        Part.TOWER: job.freeze_vision_tower,
        Part.ALIGNER: job.freeze_multi_modal_projector,
        Part.LANGUAGE_MODEL: job.freeze_language_model,
    }
    if job.freeze_language_model and (not has_tower or all(is_frozen.values())):
        raise InvalidConfig("freeze_language_model leaves nothing to train", hint="freeze_language_model: false")
    for name, parameter in model.named_parameters() if has_tower else ():
        if is_frozen[parts[name]]:
            parameter.requires_grad_(False)
    _freeze_by_name(model, job)


def _freeze_by_name(model: Any, job: Job) -> None:
    """Freezes the parameters that a job names.

    Raises InvalidConfig for a pattern that is in no name, and if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("freeze", job.freeze), ("train_only", job.train_only)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                hint = f"Names look like {', '.join(names[:: max(1, len(names) // 3)][:3])}."
                raise InvalidConfig(f'{key} has "{pattern}", which is in no name of a parameter', hint=hint)
    for name, parameter in model.named_parameters():
        if freezing.is_frozen(name, freeze=job.freeze, train_only=job.train_only):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidConfig("freeze and train_only leave nothing to train", hint="Remove one of the patterns.")


def freeze_vision(model: Any) -> None:
    """Freezes the vision tower with any aligner in it; nothing in a language model."""
    for name, parameter in model.named_parameters():
        if is_vision(name):
            parameter.requires_grad_(False)
