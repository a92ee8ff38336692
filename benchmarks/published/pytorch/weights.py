"""The parameter tensors of a model in the order in which they reach the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from benchmarks.published.training_code import published
from dstrain.choices import Method
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.plan.configuration import TrainedModel
from dstrain.plan.memory.params import (
    adapted,
    adapted_experts,
    adapter_sizes,
    is_in_layer,
    is_inside,
    kept_whole,
    trains_in_full,
)
from dstrain.plan.training_code import TrainingCode


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor."""

    numel: int
    """Number of elements."""
    trains: bool
    """Whether the tensor has a gradient."""
    is_quantized: bool
    """Whether the tensor is quantized to 4 bits."""
    decays: bool
    """Whether the tensor is in the first of the Trainer's two parameter groups."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameter tensors."""

    before: tuple[Weight, ...]
    """Vision tower and embedding."""
    layers: tuple[tuple[Weight, ...], ...]
    """Tensors of each decoder layer."""
    after: tuple[Weight, ...]
    """Last norm and head."""

    @property
    def in_order(self) -> tuple[Weight, ...]:
        """All tensors in the model's order."""
        return (*self.before, *(weight for layer in self.layers for weight in layer), *self.after)


@cache
def weights(model: ModelFacts, trained_model: TrainedModel, code: TrainingCode) -> Weights:
    """Returns the parameter tensors; an adapter's two follow the weight they adapt, and a copy that trains its own."""
    is_full, lora = trained_model.is_full, trained_model.lora
    wrapped = [] if is_full else [*adapted(model, lora), *adapted_experts(model, lora)]
    names = {group.name for group in wrapped}
    tied = [group for group in wrapped if group not in model.tensors]  # a head with the weight of the embedding
    copied = [] if is_full else kept_whole(model, lora)
    layers = model.num_hidden_layers
    inside = [group for group in model.tensors if is_inside(group)]
    before = [group for group in model.tensors if group.kind in (Kind.VISION, Kind.EMBEDDING)]
    after = [group for group in model.tensors if not is_inside(group) and group not in before]

    def expanded(group: TensorGroup, layer: int = 0) -> list[Weight]:
        quantized = trained_model.method is Method.QLORA and _is_quantized(group, code)
        trains = is_full and trains_in_full(group, layer, layers)
        decays = group.kind is not Kind.NORM and not group.name.endswith("bias")
        parts = _parts(group, code)
        tensors = [Weight(group.numel // parts, trains, quantized, decays)] * parts
        if group.name in names:
            tensors += [Weight(size, True, False, True) for size in adapter_sizes(group, lora)]
        return tensors + [Weight(group.numel, True, False, decays)] * (group in copied)

    return Weights(
        before=tuple(weight for group in before for _ in range(group.count) for weight in expanded(group)),
        layers=tuple(
            tuple(weight for group in inside if is_in_layer(group, index, layers) for weight in expanded(group, index))
            for index in range(layers)
        ),
        after=(
            *(weight for group in after for weight in expanded(group)),
            *(Weight(size, True, False, True) for group in tied for size in adapter_sizes(group, lora)),
        ),
    )


def _is_quantized(group: TensorGroup, code: TrainingCode) -> bool:
    return group.is_quantizable or (published(code).has_linear_experts and group.kind in (Kind.EXPERT, Kind.ROUTER))


def _parts(group: TensorGroup, code: TrainingCode) -> int:
    """Returns how many tensors hold a group: one, unless every expert has linears of its own."""
    if not published(code).has_linear_experts or group.kind is not Kind.EXPERT or len(group.shape) < 3:
        return 1
    return group.shape[0] * (2 if "gate_up" in group.name else 1)
