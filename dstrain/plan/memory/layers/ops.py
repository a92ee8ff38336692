"""PyTorch operations and linear layers on sizes: allocations, saved tensors, and allocations of the backward pass.

Source of every rule: torch 2.13 tools/autograd/derivatives.yaml and the CUDA kernels it names.
"""

from __future__ import annotations

from collections.abc import Callable

from dstrain.plan.memory.layers.tape import Node, Param, Tape, Tensor, Tensors, View

FP32 = 4
"""Bytes of an element in fp32."""
INDEX = 8
"""Bytes of an index, such as the id of a token."""


def view(x: Tensor) -> Tensor:
    """Returns another tensor of the same storage."""
    return Tensor(x.storage, x.numel, x.item, x.node)


def marked(tape: Tape, x: Tensor, mark: Callable[[], None]) -> Tensor:
    """Passes x through; `mark` is called when its gradient comes back."""
    if x.node is None:
        return x

    def backward(grad: Tensor) -> Tensors:
        mark()
        return (grad,)

    return Tensor(x.storage, x.numel, x.item, tape.node((x,), backward))


def cast(tape: Tape, x: Tensor, item: int) -> Tensor:
    """`x.to(dtype)`; nothing happens where the dtype is the same."""
    if x.item == item:
        return view(x)
    node = None
    if tape.needs(x):
        numel, back = x.numel, x.item
        node = tape.node((x,), lambda grad: (tape.new(numel, back),))
    return tape.new(x.numel, item, node)


def unary(tape: Tape, x: Tensor) -> Tensor:
    """An elementwise operation whose backward pass needs nothing: negation, a constant factor or summand."""
    node = None
    if tape.needs(x):
        numel, item = x.numel, x.item
        node = tape.node((x,), lambda grad: (tape.new(numel, item),))
    return tape.new(x.numel, x.item, node)


def activation(tape: Tape, x: Tensor) -> Tensor:
    """SiLU or GELU: keeps its input."""
    node = None
    if tape.needs(x):
        saved = tape.save(x)

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.like(grad),)

        node = tape.node((x,), backward)
    return tape.new(x.numel, x.item, node)


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """Softmax or sigmoid: keeps its result."""
    result = tape.new(x.numel, x.item)
    if not tape.needs(x):
        return result
    saved = tape.save(view_without_node(result))

    def backward(grad: Tensor) -> Tensors:
        kept = saved.take()
        product = tape.like(grad)
        del kept
        return (product,)

    return Tensor(result.storage, result.numel, result.item, tape.node((x,), backward))


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """The sum of two tensors of one size: both get the gradient itself."""
    node = tape.node((x, y), lambda grad: (view(grad), view(grad))) if tape.needs(x, y) else None
    return tape.new(x.numel, x.item, node)


def sub(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """The difference of two tensors of one size: the first gets the gradient itself."""
    node = None
    if tape.needs(x, y):
        needs_y, numel, item = y.node is not None, y.numel, y.item
        node = tape.node((x, y), lambda grad: (view(grad), tape.new(numel, item) if needs_y else None))
    return tape.new(x.numel, x.item, node)


def add_up(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """The sum of two tensors of one size and perhaps two dtypes: in the wider one, gradients cast back."""
    if x.item == y.item:
        return add(tape, x, y)
    node = None
    if tape.needs(x, y):
        numel, items, wide = x.numel, (x.item, y.item), max(x.item, y.item)
        node = tape.node(
            (x, y), lambda grad: tuple(view(grad) if item == wide else tape.new(numel, item) for item in items)
        )
    return tape.new(x.numel, max(x.item, y.item), node)


def mul(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """The product of x with y of the same size, or broadcast: each is kept for the other's gradient."""
    node = None
    if tape.needs(x, y):
        needs_x, needs_y = x.node is not None, y.node is not None
        saved = tape.save(x if needs_y else None, y if needs_x else None)
        x_item, y_numel, y_item = x.item, y.numel, y.item

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            grad_y = tape.like(grad) if needs_y else None
            grad_x = tape.like(grad) if needs_x else None
            del kept  # what follows is the engine's, which fits gradients to their tensors
            if grad_x is not None and x_item != grad.item:
                grad_x = tape.new(grad.numel, x_item)
            if grad_y is not None and (y_numel, y_item) != (grad.numel, grad.item):
                grad_y = tape.new(y_numel, y_item)  # summed over what was broadcast; the product goes
            return (grad_x, grad_y)

        node = tape.node((x, y), backward)
    return tape.new(x.numel, max(x.item, y.item), node)


def scale(tape: Tape, x: Tensor, weight: Param, item: int) -> Tensor:
    """The product with a parameter vector: x is kept where the parameter trains."""
    node = None
    if tape.needs(x, weight):
        trains, needs_x, width = weight.trains, x.node is not None, weight.numel
        saved = tape.save(x if trains else None)

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            product = tape.like(grad) if trains else None
            grad_x = tape.like(grad) if needs_x else None
            grad_weight = tape.grad(width, item) if trains else None  # the product, summed over rows
            del kept, product
            return (grad_x, grad_weight)

        node = tape.node((x, weight), backward)
    return tape.new(x.numel, x.item, node)


def inverse_rms(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """`rsqrt(mean(x²) + eps)` of each row: keeps x for the square and its result for the root."""
    node = None
    square = tape.new(x.numel, x.item)
    if tape.needs(x):
        kept_x = tape.save(x)
        numel, item = x.numel, x.item

        def backward(grad: Tensor) -> Tensors:
            root = kept_root.take()
            small = [tape.new(rows, item) for _ in range(2)]
            del root, small
            spread = tape.new(numel, item)  # the mean's gradient, written out
            kept = kept_x.take()
            power = tape.new(numel, item)
            twice = tape.new(numel, item)
            result = tape.new(numel, item)
            del power, twice, spread, kept  # one expression: its temporaries go together
            return (result,)

        node = tape.node((x,), backward)
    mean = tape.new(rows, x.item)
    del square
    shifted = tape.new(rows, x.item)
    del mean
    result = tape.new(rows, x.item, node)
    del shifted
    if node is not None:
        kept_root = tape.save(view_without_node(result))
    return result


def view_without_node(x: Tensor) -> Tensor:
    """Returns a view outside the graph, so that what a node keeps does not keep the node."""
    return Tensor(x.storage, x.numel, x.item)


def cat(tape: Tape, pieces: tuple[Tensor, ...]) -> Tensor:
    """Pieces side by side; the gradient is cut into views."""
    numel, item = sum(piece.numel for piece in pieces), pieces[0].item
    node = None
    if tape.needs(*pieces):
        sizes = [piece.numel for piece in pieces]

        def backward(grad: Tensor) -> Tensors:
            return tuple(View(grad.storage, size, item) for size in sizes)

        node = tape.node(pieces, backward)
    return tape.new(numel, item, node)


def cut(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """A slice of x: a view, whose gradient is written into zeros of the whole size."""
    node: Node | None = None
    if tape.needs(x):
        whole, item = x.numel, x.item
        node = tape.node((x,), lambda grad: (tape.new(whole, item),))
    return Tensor(x.storage, numel, x.item, node)


def split(tape: Tape, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`chunk` or `split`: views whose gradients meet in one tensor of the whole size."""
    if not tape.needs(x):
        return tuple(Tensor(x.storage, size, x.item) for size in sizes)
    whole, item = x.numel, x.item
    meet = tape.node((x,), lambda grad: (grad,))
    waiting = [len(sizes)]
    gradients: list[Tensor] = []

    def backward(grad: Tensor) -> Tensors:
        waiting[0] -= 1
        gradients.append(grad)
        if waiting[0]:
            return (None,)
        joined = tape.new(whole, item)
        gradients.clear()
        return (joined,)

    pieces = []
    for size in sizes:
        piece = tape.node((), backward)
        piece.inputs = (meet,)
        pieces.append(Tensor(x.storage, size, item, piece))
    return tuple(pieces)


def copy(tape: Tape, x: Tensor) -> Tensor:
    """`contiguous()` or `reshape` of what is not laid out so: a copy, and another for the gradient's way back."""
    node = tape.node((x,), lambda grad: (view(grad),)) if tape.needs(x) else None
    return tape.new(x.numel, x.item, node)


def resized(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """Rows written out repeatedly, padded, or summed with their neighbours: another tensor, and so is the gradient."""
    before, item = x.numel, x.item
    node = tape.node((x,), lambda grad: (tape.new(before, item),)) if tape.needs(x) else None
    return tape.new(numel, x.item, node)


def shared(tape: Tape, x: Tensor, count: int) -> Tensor:
    """A view of x as `count` of it, whose gradient is summed."""
    numel, item = x.numel, x.item
    node = tape.node((x,), lambda grad: (tape.new(numel, item),)) if tape.needs(x) else None
    return Tensor(x.storage, numel * count, item, node)


def picked(tape: Tape, x: Tensor, numel: int, indices: Tensor) -> Tensor:
    """`x[indices]`, or x written into zeros at them: keeps the indices; the gradient is as large as x.

    Source: torch 2.13 tools/autograd/FunctionsManual.cpp: index_backward, value_selecting_reduction_backward.
    """
    node = None
    if tape.needs(x):
        saved = tape.save(indices)
        before, item = x.numel, x.item

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.new(before, item),)

        node = tape.node((x,), backward)
    return tape.new(numel, x.item, node)


def dropout(tape: Tape, x: Tensor, p: float) -> Tensor:
    """Dropout: keeps a mask of one byte an element. Source: ATen/native/cuda/Dropout.cu: fused_dropout."""
    if p == 0:
        return view(x)
    node = None
    if tape.needs(x):
        mask = tape.new(x.numel, 1)
        saved = tape.save(mask)

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.like(grad),)

        node = tape.node((x,), backward)
    return tape.new(x.numel, x.item, node)


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
            # ZeRO-3's linear keeps the module's parameter, not the gathered weight, and gathers it once more
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
