"""Adapters of experts on the tape: PEFT adds them to a copy of the weights of all experts of a layer.

Source: peft 0.21 tuners/lora/layer.py: ParamWrapper, _LoraFactorsProxy; torch 2.13 nn/utils/parametrize.py.
"""

from __future__ import annotations

from dstrain.plan.memory.layers import products
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.tensor import Param, Tensor

UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""The weights of a layer's experts."""


def check(run: Context) -> None:
    """Adds each adapter once before the experts are called, to see that the shape stays; the outer one first."""
    for name in (DOWN, UP):
        if run.adapts_experts(name):
            _added(run, name)


def weight(run: Context, name: str) -> Param | Tensor:
    """The matrices of all experts: the parameter, or a copy with the adapter of each expert added."""
    if run.adapts_experts(name):
        return _added(run, name)
    experts, outputs, inputs = _shape(run, name)
    return Param(experts * outputs * inputs, trains=run.trains)


def _shape(run: Context, name: str) -> tuple[int, int, int]:
    """Returns the number of experts, and the outputs and inputs of the matrix of each."""
    moe, width = run.moe, run.model.hidden_size
    sides = (2 * moe.intermediate_size, width) if name == UP else (width, moe.intermediate_size)
    return moe.num_experts, *sides


def _added(run: Context, name: str) -> Tensor:
    """`baddbmm(weight, up, down)`: the copy needs no input for its gradient, each factor the other one.

    The gradient of a factor is a product, which is then scaled. Factors are kept as views of parameters, so that what
    ZeRO-3 has gathered of these stays when it gives them back.
    """
    tape, item = run.tape, run.variant.item
    experts, outputs, inputs = _shape(run, name)
    factors = [_factor(run, experts * run.variant.model.lora.rank * side) for side in (outputs, inputs)]
    numel, sizes = experts * outputs * inputs, [factor.numel for factor in factors]
    node = None
    if tape.needs(*factors):
        are_params = [isinstance(factor, Param) for factor in factors]
        casts = [factor for factor in factors if isinstance(factor, Tensor)]
        saved = tape.save(*([tape.new(size, item) for size in sizes] if tape.keeps_inputs else casts))

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            grads = []
            for size, is_param in zip(sizes, are_params, strict=True):
                product = tape.new(size, item)
                grads.append(tape.grad(size, item) if is_param else tape.new(size, item))
                del product
            del kept
            return tuple(grads)

        node = tape.node(tuple(factors), backward)
    whole = tape.gathered(numel, item)
    result = tape.new(numel, item, node)
    del whole
    return result


def _factor(run: Context, numel: int) -> Param | Tensor:
    """One of the two matrices of an adapter, in the dtype of the weights."""
    param, item = Param(numel, trains=True), run.variant.adapter_item
    return param if item == run.variant.item else products.cast_param(run.tape, param, item, run.variant.item)
