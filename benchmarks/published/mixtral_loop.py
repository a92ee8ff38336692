"""Mixtral's experts as Transformers 4 had them: linear layers, one expert after the other."""

from __future__ import annotations

from dstrain.plan.memory.layers import ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Tensor, Tensors

INDEX = 8
"""Bytes of an index."""


def mixtral(run: Context, x: Tensor) -> Tensor:
    """Mixtral's block: every expert takes its tokens, as many as the others, and adds to the result in place.

    Source: Transformers 4.48 modeling_mixtral.py: MixtralSparseMoeBlock.
    """
    tape, moe, width = run.tape, run.model.moe, run.model.hidden_size
    assert moe is not None
    rows = x.numel // width
    logits = run.product(x, moe.num_experts, width)
    scores = ops.softmax(tape, ops.cast(tape, logits, ops.FP32))
    weights = ops.cast(tape, ops.cut(tape, scores, rows * moe.experts_per_token), x.item)
    result = tape.new(x.numel, x.item)
    mask = tape.new(rows * moe.experts_per_token * moe.num_experts, INDEX)
    share = rows * moe.experts_per_token // moe.num_experts
    for _ in range(moe.num_experts):
        added = _weighed(run, _expert(run, _taken(run, x, share)), weights, share)
        result = _added(run, result, added)
    del mask, logits
    return result


def _taken(run: Context, x: Tensor, rows: int) -> Tensor:
    """The tokens of one expert: keeps their places; the gradient is written into zeros."""
    tape, numel, item = run.tape, x.numel, x.item
    places = tape.new(rows, INDEX)
    node = None
    if tape.needs(x):
        saved = tape.save(places)

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.new(numel, item),)

        node = tape.node((x,), backward)
    return tape.new(rows * run.model.hidden_size, item, node)


def _expert(run: Context, x: Tensor) -> Tensor:
    moe, width = run.model.moe, run.model.hidden_size
    assert moe is not None
    inner = moe.intermediate_size
    return run.product(
        ops.mul(run.tape, ops.activation(run.tape, run.product(x, inner, width)), run.product(x, inner, width)),
        width,
        inner,
    )


def _weighed(run: Context, x: Tensor, weights: Tensor, rows: int) -> Tensor:
    return ops.mul(run.tape, x, ops.cut(run.tape, weights, rows))


def _added(run: Context, result: Tensor, added: Tensor) -> Tensor:
    """`index_add_` in place; what was added gets its rows of the gradient."""
    tape = run.tape
    if not tape.needs(result, added):
        return result
    numel, item = added.numel, added.item
    node = tape.node((result, added), lambda grad: (ops.view(grad), tape.new(numel, item)))
    return Tensor(result.storage, result.numel, result.item, node)
