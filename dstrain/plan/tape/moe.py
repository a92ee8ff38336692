"""Mixtures of experts on the tape: routers, and experts as grouped matrix products."""

from __future__ import annotations

from dstrain.facts.model import Moe
from dstrain.plan.tape import blocks, ops
from dstrain.plan.tape.context import Context
from dstrain.plan.tape.graph import Tensors
from dstrain.plan.tape.tensor import Param, Tensor

INDEX = 8
"""Bytes of an index."""


def qwen3_moe(run: Context, x: Tensor) -> Tensor:
    """Qwen 3's block: softmax in fp32, the best k, normalised to sum 1."""
    logits, weights, indices = softmax_router(run, x, normalises=True)
    output = grouped_experts(run, x, weights, indices)
    del logits
    return output


def mixtral(run: Context, x: Tensor) -> Tensor:
    """Mixtral's block."""
    return qwen3_moe(run, x)


def _moe(run: Context) -> Moe:
    moe = run.model.moe
    assert moe is not None
    return moe


def router_logits(run: Context, x: Tensor, item: int) -> Tensor:
    """The router's linear layer."""
    moe, width = _moe(run), run.model.hidden_size
    rows = x.numel // width
    weight = Param(moe.num_experts * width, trains=run.trains)
    return ops.matmul(run.tape, ops.cast(run.tape, x, item), weight, rows * moe.num_experts, item)


def softmax_router(run: Context, x: Tensor, *, normalises: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits, routing weights and the indices of the experts of each token."""
    tape, item = run.tape, x.item
    logits = router_logits(run, x, item)
    probabilities = blocks.softmax(run, ops.cast(tape, logits, ops.FP32))
    weights, indices = top_k(run, probabilities)
    del probabilities
    if normalises:
        weights = normalised(run, weights)
    return logits, ops.cast(tape, weights, item), indices


def top_k(run: Context, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best k of each row: keeps the indices; the gradient is written into zeros."""
    tape, moe = run.tape, _moe(run)
    picked = scores.numel // moe.num_experts * moe.experts_per_token
    indices = tape.new(picked, INDEX)
    node = None
    if tape.needs(scores):
        saved = tape.save(indices)
        numel, item = scores.numel, scores.item

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.new(numel, item),)

        node = tape.node((scores,), backward)
    return tape.new(picked, scores.item, node), indices


def normalised(run: Context, weights: Tensor) -> Tensor:
    """Weights divided by their sum in place: keeps a copy of neither, only the sums and the result."""
    tape = run.tape
    if not tape.needs(weights):
        return weights
    sums = tape.new(weights.numel // _moe(run).experts_per_token, weights.item)
    saved = tape.save(ops.view_without_node(weights), sums)

    def backward(grad: Tensor) -> Tensors:
        saved.take()
        first, second = tape.like(grad), tape.like(grad)
        del first
        return (second,)

    return Tensor(weights.storage, weights.numel, weights.item, tape.node((weights,), backward))


def grouped_experts(run: Context, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """All experts as two grouped products over rows sorted by expert.

    Source: Transformers 5.23 integrations/moe.py: grouped_mm_experts_forward.
    """
    tape, moe, width = run.tape, _moe(run), run.model.hidden_size
    rows = indices.numel
    sorted_ids, order = tape.new(rows, INDEX), tape.new(rows, INDEX)
    chosen = picked(run, x, rows * width, tape.new(rows, INDEX))
    sorted_weights = picked(run, weights, rows, order)
    histogram = tape.new(rows, 4)
    del histogram
    both = grouped_product(run, chosen, 2 * moe.intermediate_size, width)
    gate, up = ops.split(tape, both, (both.numel // 2, both.numel // 2))
    del both
    product = ops.mul(tape, ops.activation(tape, gate), up)
    del gate, up
    product = grouped_product(run, product, width, moe.intermediate_size)
    weighted = ops.mul(tape, product, sorted_weights)
    inverse, counted = tape.new(rows, INDEX), tape.new(rows, INDEX)
    del counted
    weighted = picked(run, weighted, rows * width, inverse)
    del sorted_ids
    return summed(run, weighted, rows * width // moe.experts_per_token)


def picked(run: Context, x: Tensor, numel: int, indices: Tensor) -> Tensor:
    """`x[indices]`: keeps the indices; the gradient is added into zeros."""
    tape = run.tape
    node = None
    if tape.needs(x):
        saved = tape.save(indices)
        before, item = x.numel, x.item

        def backward(grad: Tensor) -> Tensors:
            saved.take()
            return (tape.new(before, item),)

        node = tape.node((x,), backward)
    return tape.new(numel, x.item, node)


def summed(run: Context, x: Tensor, numel: int) -> Tensor:
    """A sum over neighbours; the gradient is a view of that of the sum."""
    tape = run.tape
    node = None
    if tape.needs(x):
        before, item = x.numel, x.item
        node = tape.node((x,), lambda grad: (Tensor(grad.storage, before, item),))
    return tape.new(numel, x.item, node)


def grouped_product(run: Context, x: Tensor, outputs: int, inputs: int) -> Tensor:
    """The rows of each expert times its matrix, for all experts at once."""
    numel = _moe(run).num_experts * outputs * inputs
    weight = Param(numel, trains=run.trains)
    return ops.matmul(run.tape, x, weight, x.numel // inputs * outputs, run.variant.item)
