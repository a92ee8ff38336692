"""Marks the tensors of a model that a job freezes: by name, and the parts of a vision-language model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dstrain.choices import Method
from dstrain.facts.model.model_facts import ModelFacts, TensorGroup
from dstrain.facts.model.parts import FROZEN, Part, part_of
from dstrain.job.schema import Job
from dstrain.job.task_limits import PARTS
from dstrain.plan.memory.params import is_inside, layers_of


def is_frozen(name: str, *, freeze: Iterable[str], train_only: Sequence[str]) -> bool:
    """Returns whether a job freezes a parameter: patterns are regular expressions that may match anywhere in its name.

    >>> is_frozen("model.layers.3.mlp.up_proj.weight", freeze=[r"layers\\.[0-7]\\."], train_only=[])
    True
    >>> is_frozen("model.embed_tokens.weight", freeze=[], train_only=["mlp"])
    True
    """
    if train_only and not any(re.search(pattern, name) for pattern in train_only):
        return True
    return any(re.search(pattern, name) for pattern in freeze)


def frozen_parts(job: Job) -> frozenset[Part]:
    """Returns the parts of a vision-language model that a job does not train."""
    kept = {
        Part.TOWER: job.freeze_vision_tower,
        Part.ALIGNER: job.freeze_multi_modal_projector,
        Part.LANGUAGE_MODEL: job.freeze_language_model,
    }
    return frozenset(part for part, is_kept in kept.items() if is_kept)


def traced_without(job: Job) -> tuple[Part, ...]:
    """Returns the parts that do not train when the planner traces a model; without images no tower is at work."""
    return tuple(sorted(frozen_parts(job) if job.image_patches else FROZEN))


def with_frozen(model: ModelFacts, job: Job) -> ModelFacts:
    """Returns the model with the marks of tensors that a job freezes."""
    freeze, train_only, parts = job.freeze, job.train_only, frozen_parts(job)
    if not freeze and not train_only and (not model.has_tower or parts == FROZEN):
        return model

    def is_marked(name: str) -> bool:
        in_part = model.has_tower and part_of(name) in parts
        return in_part or is_frozen(name, freeze=freeze, train_only=train_only)

    def marked(group: TensorGroup) -> TensorGroup:
        names = _names(group, model)
        return replace(group, frozen=tuple(index for index, name in enumerate(names) if is_marked(name)))

    return replace(model, tensors=tuple(map(marked, model.tensors)))


def images_beyond(seq_len: int | None, patches: int, model: ModelFacts) -> str | None:
    """Returns how many tokens more than a sample the images of a sample are, or None; None: its length is not known."""
    tokens = model.vision.num_tokens(patches) if model.vision is not None else 0
    if seq_len is None or tokens <= seq_len:
        return None
    return f"{patches:,} patches are {tokens:,} tokens, more than the {seq_len:,} of a sample, which would be dropped"


def unplanned_parts(job: Job, model: ModelFacts) -> str | None:
    """Returns why a job has no estimate, or None.

    The planner counts trained towers and aligners of Qwen3-VL, and of other families as they were traced with images;
    with an adapter whole copies of embedding and head alone. What a tower keeps depends on the images, and a frozen
    language model trains nothing without any.
    """
    if (problem := images_beyond(job.seq_len, job.image_patches, model)) is not None:
        return f"no estimate of memory: image_patches: {problem}"
    others = [name for name in job.lora.modules_to_save if name.split(".")[-1] not in ("embed_tokens", "lm_head")]
    if others and job.method is not Method.FULL:
        return f"no estimate of memory: modules_to_save has {', '.join(others)}"
    changed = [name for name, default in PARTS.items() if getattr(job, name) is not default]
    if not changed or not model.has_tower:
        return None
    if not job.image_patches:
        return f"no estimate of memory: with {', '.join(changed)} it needs image_patches, the patches of a sample"
    return None


def _names(group: TensorGroup, model: ModelFacts) -> list[str]:
    """Returns the names of a group's parameters; in layers of several kinds, with the numbers of the first."""
    if not is_inside(group):
        return [group.name.replace("*", str(index)) for index in range(group.count)]
    return [f"{model.layers_root}.{layer}.{group.name}" for layer in layers_of(group, model.num_hidden_layers)]
