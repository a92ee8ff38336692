"""Experts that ranks share, on the tape: DeepSpeed's AutoEP in place of the family's own block.

Each rank routes its own tokens, sends each to the ranks that have its experts, and computes what others send, which is
taken to be as much. Source: deepspeed 0.19.8 module_inject/auto_ep_layer.py: AutoEPMoELayer._forward,
permute_by_local_expert, combine_from_routed; moe/ep_router.py; moe/ep_experts.py: _run_experts_grouped_mm.
"""

from __future__ import annotations

from dstrain.plan.memory.layers import ops, products
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tensor import Param, Tensor

ALIGNMENT = 8
"""Rows to which each expert's rows are padded. Source: moe/ep_kernels.py: TOKEN_GROUP_ALIGN_SIZE_M."""


def routed(run: Context, x: Tensor) -> Tensor:
    """Returns the output of the experts for x, without shared experts: (tokens, hidden)."""
    tape, moe, width = run.tape, run.moe, run.model.hidden_size
    scores, order = _route(run, x)
    rows = scores.numel
    sent = ops.picked(tape, x, rows * width, tape.new(rows, ops.INDEX))
    sent = ops.unary(tape, sent)  # an exchange: its gradient is exchanged back
    padded = rows + moe.num_experts // run.variant.parallel.ep * ALIGNMENT
    places = tape.new(padded, ops.INDEX)
    sent = ops.picked(tape, sent, padded * width, places)
    gate, up = (_grouped(run, sent, moe.intermediate_size) for _ in range(2))
    hidden = ops.mul(tape, ops.activation(tape, gate), up)
    computed = _grouped(run, hidden, width)
    del sent, gate, up, hidden
    computed = ops.picked(tape, computed, rows * width, places)
    computed = ops.unary(tape, computed)
    placed = ops.picked(tape, computed, rows * width, order)
    summed = ops.resized(tape, ops.mul(tape, placed, scores), x.numel)
    return ops.cast(tape, summed, x.item)


def _route(run: Context, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight of each expert picked for a token, in fp32, and the order of tokens by expert."""
    tape, moe, width = run.tape, run.moe, run.model.hidden_size
    tokens = x.numel // width
    weight = Param(moe.num_experts * width, trains=run.trains)
    logits = products.matmul(tape, x, weight, tokens * moe.num_experts, run.variant.item, is_flat=True)
    scores = ops.softmax(tape, ops.cast(tape, logits, ops.FP32))
    picked = tape.new(tokens * moe.experts_per_token, ops.INDEX)
    best = ops.picked(tape, scores, picked.numel, picked)
    sums = ops.resized(tape, best, tokens)
    best = ops.unary(tape, ops.mul(tape, best, sums))
    return best, tape.new(picked.numel, ops.INDEX)


def _grouped(run: Context, x: Tensor, outputs: int) -> Tensor:
    """The rows of each expert times its matrix, for all experts of this rank at once."""
    moe, width = run.moe, run.model.hidden_size
    inputs = width + moe.intermediate_size - outputs
    weight = Param(moe.num_experts // run.variant.parallel.ep * outputs * inputs, trains=run.trains)
    return products.matmul(run.tape, x, weight, x.numel // inputs * outputs, run.variant.item, is_flat=True)
