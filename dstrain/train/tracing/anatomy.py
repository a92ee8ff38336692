"""Locates the parts of a model: decoder layers, embedding, head and vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from dstrain.errors import InvalidConfig
from dstrain.facts.model.traits import is_vision


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a model whose beginning and end have a name."""

    layers_root: str
    """The name of the list of decoder layers."""
    layers: tuple[Any, ...]
    """The decoder layers."""
    embedding: Any
    """The module that token ids go into."""
    head: Any
    """The module that logits come out of, or None."""
    vision: Any
    """The vision tower, or None."""


def dissect(model: Any) -> Anatomy:
    """Returns the parts of a model, adapted or not.

    The decoder layers are the list of modules of the right length that has most parameters, outside the vision tower.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    wanted = base.config.get_text_config().num_hidden_layers
    lists = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted and not is_vision(name)
    ]
    if not lists:
        raise InvalidConfig(f"no list of {wanted} layers in Transformers' {type(base).__name__}")
    root, layers = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    towers = (module for name, module in base.named_modules() if is_vision(name.rpartition(".")[2]))
    return Anatomy(
        layers_root=root,
        layers=tuple(layers),
        embedding=base.get_input_embeddings(),
        head=base.get_output_embeddings(),
        vision=next(towers, None),
    )
