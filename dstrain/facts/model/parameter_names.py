"""The names that the parameters of a model may have, by the facts about it or by the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from dstrain.errors import InvalidConfig
from dstrain.facts.model import model_files
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup

_MOST_NAMES = 1_000_000
"""Names of one tensor group that are listed; a regular expression takes about a second to miss in as many."""
_OUTSIDE = frozenset({Kind.EMBEDDING, Kind.HEAD, Kind.VISION})


def names_of(model: ModelFacts | None, source: str) -> tuple[str, ...] | None:
    """Returns the names of a model's parameters, or None if they are not known on this machine.

    Files are asked if there are no facts: Transformers renames what some of them hold (experts, vision towers). Facts
    do not say which layers have a tensor, so names of all layers are returned; a name beyond is certainly none.
    """
    if model is not None:
        names: list[str] = []
        for group in model.tensors:
            numbers = model.num_hidden_layers * group.count ** group.name.count("*")
            if numbers > _MOST_NAMES:
                return None
            names += _names(model, group)
        return tuple(dict.fromkeys(names))
    try:
        return tuple(model_files.read(Path(source))) or None
    except InvalidConfig:  # damaged files, which `run` reports
        return None


def _names(model: ModelFacts, group: TensorGroup) -> Iterator[str]:
    pattern = group.name.replace("*", "{}")
    for numbers in product(range(group.count), repeat=pattern.count("{}")):
        name = pattern.format(*numbers)
        yield name
        if group.kind not in _OUTSIDE:
            yield from (f"{model.layers_root}.{layer}.{name}" for layer in range(model.num_hidden_layers))
