"""Matrix products on sizes: with a parameter, or of two activations."""

from __future__ import annotations

from dstrain.plan.memory.layers.graph import Tape, Tensors
from dstrain.plan.memory.layers.tensor import Param, Tensor, View


def matmul(tape: Tape, x: Tensor, weight: Param, out_numel: int, item: int, *, is_flat: bool = False) -> Tensor:
    """A linear layer's product: x is kept where the weight trains, under ZeRO-3 always; the weight is whole at work.

    Unless x is a matrix (`is_flat`), it is made one, and its gradient is a view.
    Source: deepspeed 0.19.8 runtime/zero/linear.py: LinearFunctionForZeroStage3, which replaces torch's.
    """
    node = None
    if tape.needs(x, weight):
        trains, needs_x = weight.trains, x.node is not None
        saved = tape.save(x if trains or tape.keeps_inputs else None)
        numel, x_item, x_numel = weight.numel, x.item, x.numel

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            whole = tape.gathered(numel, item)
            grad_weight = tape.grad(numel, item) if trains else None
            grad_x = tape.new(x_numel, x_item) if needs_x else None
            if grad_x is not None and not is_flat:
                grad_x = View(grad_x.storage, x_numel, x_item)
            del kept, whole
            return (grad_x, grad_weight)

        node = tape.node((x, weight), backward)
    whole = tape.gathered(weight.numel, item)
    result = tape.new(out_numel, item, node)
    del whole
    return result


def bias(tape: Tape, x: Tensor, weight: Param) -> Tensor:
    """A bias, added within the product before it: its gradient is a sum of rows."""
    if not weight.trains or not tape.grad_enabled:
        return x
    width, item = weight.numel, x.item
    node = tape.node((x, weight), lambda grad: (grad, tape.grad(width, item)))
    return Tensor(x.storage, x.numel, x.item, node)


def product(tape: Tape, x: Tensor, y: Tensor, numel: int) -> Tensor:
    """A matrix product of two tensors neither of which is a parameter: each is kept for the other's gradient."""
    node = None
    if tape.needs(x, y):
        needs_x, needs_y = x.node is not None, y.node is not None
        saved = tape.save(x if needs_y else None, y if needs_x else None)
        x_numel, y_numel, item = x.numel, y.numel, x.item

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            grad_x = tape.new(x_numel, item) if needs_x else None
            grad_y = tape.new(y_numel, item) if needs_y else None
            del kept
            return (grad_x, grad_y)

        node = tape.node((x, y), backward)
    return tape.new(numel, x.item, node)


def cast_param(tape: Tape, weight: Param, item: int, wide: int) -> Tensor:
    """A parameter of `item` bytes an element, cast to `wide` for one product."""
    numel = weight.numel
    node = tape.node((weight,), lambda grad: (tape.grad(numel, item),)) if tape.needs(weight) else None
    return tape.new(numel, wide, node)
