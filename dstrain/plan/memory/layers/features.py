"""How features of images enter the decoder on the tape: among the embeddings, and into outputs of its first layers."""

from __future__ import annotations

from dstrain.plan.memory.layers import ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.tensor import Tensor


def scattered(run: Context, hidden: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """`masked_scatter`: the gradient is copied with zeros in the place of features, and theirs is picked out of it."""
    tape, node = run.tape, None
    if tape.needs(hidden, features):
        saved = tape.save(mask)
        needs_hidden, needs_features = hidden.node is not None, features.node is not None
        sizes, item = (hidden.numel, features.numel), hidden.item

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            rest = tape.new(sizes[0], item) if needs_hidden else None
            return (rest, tape.new(sizes[1], item) if needs_features else None)

        node = tape.node((hidden, features), backward)
    return tape.new(hidden.numel, hidden.item, node)


def deepened(run: Context, hidden: Tensor, level: Tensor, mask: Tensor) -> Tensor:
    """A layer's output with features added at the image tokens: a copy, some of whose rows are written again.

    A mask is turned to indices for each use.
    Source: Transformers 5.23 modeling_qwen3_vl.py: Qwen3VLTextModel._deepstack_process.
    """
    tape = run.tape
    copied = ops.copy(tape, hidden)
    places = tape.new(2 * level.numel // run.model.hidden_size, ops.INDEX)
    rows = ops.picked(tape, copied, level.numel, mask)
    del places
    return _written(run, copied, ops.add(tape, rows, level), mask)


def _written(run: Context, x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """`x[mask] = rows` in place: the gradient is copied with zeros there, and picked there."""
    tape = run.tape
    if not tape.needs(x, rows):
        return x
    saved = tape.save(mask)
    sizes, item = (x.numel, rows.numel), x.item

    def backward(grad: Tensor) -> Tensors:
        saved.take()
        zeros = tape.new(sizes[1], item)
        rest = tape.new(sizes[0], item)
        del zeros
        return (rest, tape.new(sizes[1], item))

    return Tensor(x.storage, x.numel, x.item, tape.node((x, rows), backward))
