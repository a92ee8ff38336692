"""Parts of a vision-language model, by the names of parameters: tower, aligner and language model."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

VISION = frozenset({"visual", "vision_tower", "vision_model", "audio_tower"})
"""Module names of the tower in Transformers' vision-language models; some have a tower for sound beside it, of which
nothing is asked."""
ALIGNER = frozenset(
    {"merger", "deepstack_merger_list", "multi_modal_projector", "aligner", "connector", "image_newline"}
)
"""Names of what joins tower and language model; in the models of Qwen and GLM it is a part of the tower's module."""


class Part(StrEnum):
    """A part of a vision-language model."""

    TOWER = "vision tower"
    ALIGNER = "multi-modal projector"
    LANGUAGE_MODEL = "language model"


FROZEN = frozenset({Part.TOWER, Part.ALIGNER})
"""The parts that do not train unless a job says so."""


def has_tower(config: Any) -> bool:
    """Returns whether a configuration of Transformers describes a vision-language model."""
    return hasattr(config, "vision_config")


def is_vision(name: str) -> bool:
    """Returns whether a module or parameter belongs to a vision tower, or to an aligner within it."""
    return not VISION.isdisjoint(name.split("."))


def part_of(name: str) -> Part:
    """Returns the part to which a parameter belongs.

    >>> part_of("model.visual.merger.norm.weight").value, part_of("model.visual.blocks.0.norm1.weight").value
    ('multi-modal projector', 'vision tower')
    """
    if not ALIGNER.isdisjoint(name.split(".")):
        return Part.ALIGNER
    return Part.TOWER if is_vision(name) else Part.LANGUAGE_MODEL
