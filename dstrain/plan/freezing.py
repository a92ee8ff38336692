"""Marks the tensors of a model that a job freezes by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dstrain.facts.model.model_facts import ModelFacts, TensorGroup
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


def with_frozen(model: ModelFacts, *, freeze: Sequence[str], train_only: Sequence[str]) -> ModelFacts:
    """Returns the model with the marks of tensors that a job freezes."""
    if not freeze and not train_only:
        return model

    def marked(group: TensorGroup) -> TensorGroup:
        names = _names(group, model.num_hidden_layers)
        frozen = (index for index, name in enumerate(names) if is_frozen(name, freeze=freeze, train_only=train_only))
        return replace(group, frozen=tuple(frozen))

    return replace(model, tensors=tuple(map(marked, model.tensors)))


def _names(group: TensorGroup, num_layers: int) -> list[str]:
    """Returns the names of a group's parameters, as Llama has them."""
    if not is_inside(group):
        return [group.name] * group.count
    return [f"model.layers.{layer}.{group.name}" for layer in layers_of(group, num_layers)]
