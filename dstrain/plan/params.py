"""How many parameters train, and what holds them."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import Method
from dstrain.facts.model import Kind, ModelFacts, TensorGroup
from dstrain.job import Lora

NF4_BYTES_PER_PARAM = 0.5 + 1 / 64 + 4 / (64 * 256)
"""NF4 with double quantisation: 4 bits, one 8-bit scale for 64 weights, one fp32 scale for 256 of those.
Source: QLoRA (arXiv 2305.14314), section 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The parameters of a run, in elements, split by what happens to them."""

    trainable: int
    """Elements with gradients and optimizer states."""
    frozen: int
    """Elements kept in the compute dtype, without gradients."""
    quantized: int
    """Frozen elements of linears kept in 4 bits."""
    largest_trainable: int
    """Elements of the largest trainable tensor, whose gradient exists whole for a moment."""


def adapted(model: ModelFacts, lora: Lora) -> list[TensorGroup]:
    """Returns the linears that get an adapter: by name, or every one outside the head and the vision tower.

    Source: peft 0.21 tuners_utils.py: _maybe_include_all_linear_layers (the output layer is left out); Transformers 5
    keeps experts in 3-D parameters, which are not linears.
    """
    linears = [group for group in model.tensors if group.is_linear and group.kind is not Kind.VISION]
    if lora.targets == ("all-linear",):
        return [group for group in linears if group.kind is not Kind.HEAD]
    return [group for group in linears if group.name.removesuffix(".weight").split(".")[-1] in lora.targets]


def lora_params(model: ModelFacts, lora: Lora) -> int:
    """Returns the parameters of the adapters: rank × (inputs + outputs) for every adapted linear.

    Source: LoRA (arXiv 2106.09685), section 4.1.
    """
    return sum(lora.rank * sum(group.shape) * group.count for group in adapted(model, lora))


def trained(model: ModelFacts, method: Method, lora: Lora) -> Trained:
    """Returns what trains and what does not; the vision tower is frozen under every method."""
    if method is Method.FULL:
        vision = model.num_params_of(Kind.VISION)
        largest = max(group.numel for group in model.tensors if group.kind is not Kind.VISION)
        return Trained(trainable=model.num_params - vision, frozen=vision, quantized=0, largest_trainable=largest)
    adapters = lora_params(model, lora)
    largest = max((lora.rank * max(group.shape) for group in adapted(model, lora)), default=0)
    quantized = 0
    if method is Method.QLORA:
        quantized = sum(
            g.numel * g.count for g in model.tensors if g.is_linear and g.kind not in (Kind.HEAD, Kind.VISION)
        )
    return Trained(
        trainable=adapters,
        frozen=model.num_params - quantized,
        quantized=quantized,
        largest_trainable=largest,
    )
