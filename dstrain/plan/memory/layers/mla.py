"""DeepSeek's multi-head latent attention on the tape: keys and values come from a low-rank latent."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.plan.memory.layers import attention, blocks, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.graph import Tensors
from dstrain.plan.memory.layers.tensor import Tensor

Turn = Callable[[Context, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rotates the parts of queries and keys that positions turn."""


def latent_attention(run: Context, x: Tensor, turn: Turn) -> Tensor:
    """Latent attention in training: the latent is expanded to keys and values for every head.

    Source: Transformers 5.23 modeling_deepseek_v3.py: DeepseekV3Attention.forward.
    """
    tape, model, rows = run.tape, run.model, run.rows
    heads, rope = model.num_attention_heads // run.variant.parallel.tp, model.rotary_dim
    q = blocks.by_head(run, _queries(run, x))
    q_pass, q_turned = ops.split(tape, q, (q.numel - rows * heads * rope, rows * heads * rope))
    compressed = run.linear(x, "self_attn.kv_a_proj_with_mqa")
    latent, k_turned = ops.split(tape, compressed, (compressed.numel - rows * rope, rows * rope))
    latent = blocks.rms_norm(run, latent, latent.numel // rows)
    q_turned, k_turned = turn(run, q_turned, k_turned)
    queries = ops.cat(tape, (q_pass, q_turned))
    keys, values = _expanded(run, latent, k_turned, heads)
    output = attention.self_attention(run, queries, keys, values, heads, is_cat=True)
    result = run.linear(output, "self_attn.o_proj", shards="rows")
    del q, compressed  # the frame holds what these are views of
    return result


def _queries(run: Context, x: Tensor) -> Tensor:
    """Queries, through a latent of their own in the larger models."""
    if "self_attn.q_proj" in run.linears:
        return run.linear(x, "self_attn.q_proj", shards="columns")
    latent = run.linear(x, "self_attn.q_a_proj")
    normed = blocks.rms_norm(run, latent, latent.numel // run.rows)
    del latent
    return run.linear(normed, "self_attn.q_b_proj", shards="columns")


def _expanded(run: Context, latent: Tensor, k_turned: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of every head. Source: as above, DeepseekV3Attention.expand_kv."""
    tape, model = run.tape, run.model
    both = blocks.by_head(run, run.linear(latent, "self_attn.kv_b_proj", shards="columns"))
    numel = run.rows * heads * (model.head_dim - model.rotary_dim)
    k_pass, values = ops.split(tape, both, (numel, both.numel - numel))
    return _assembled(run, k_pass, ops.shared(tape, k_turned, heads)), values


def _assembled(run: Context, first: Tensor, second: Tensor) -> Tensor:
    """Two pieces written one after the other into slices of a new tensor.

    The gradient goes back through either write, which copies it whole, and its own slice once more.
    Source: torch 2.13 csrc/autograd/functions/tensor.cpp: CopySlices::apply.
    """
    tape, item = run.tape, first.item
    numel, sizes = first.numel + second.numel, (first.numel, second.numel)
    whole = tape.new(numel, item)

    def first_backward(grad: Tensor) -> Tensors:
        rest = tape.new(numel, item)
        piece = tape.new(sizes[0], item)
        del rest
        return (piece,)

    def second_backward(grad: Tensor) -> Tensors:
        rest = tape.new(numel, item)
        piece = tape.new(sizes[1], item)
        zeros = tape.new(sizes[1], item)
        del zeros
        return (rest, piece)

    if tape.needs(first, second):
        written = Tensor(None, numel, item, tape.node((first,), first_backward))
        whole.node = tape.node((written, second), second_backward)
    return whole


def interleaved_rotary(run: Context, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek V3's rotation of neighbouring elements, in the training precision.

    Source: Transformers 5.23 modeling_deepseek_v3.py: apply_rotary_pos_emb_interleave.
    """
    return _interleaved(run, q), _interleaved(run, k)


def _interleaved(run: Context, x: Tensor) -> Tensor:
    tape, half = run.tape, x.numel // 2
    cos, sin = run.tables
    even, odd = ops.cut(tape, x, half), ops.cut(tape, x, half)
    return ops.cat(
        tape,
        (
            ops.sub(tape, ops.mul(tape, even, cos), ops.mul(tape, odd, sin)),
            ops.add(tape, ops.mul(tape, odd, cos), ops.mul(tape, even, sin)),
        ),
    )


def complex_rotary(run: Context, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek V2's rotation: a product of complex numbers, in fp32.

    Source: Transformers 5.23 modeling_deepseek_v2.py: apply_rotary_emb.
    """
    tape = run.tape
    wide_q, wide_k = ops.cast(tape, q, ops.FP32), ops.cast(tape, k, ops.FP32)
    turned_q = ops.cast(tape, ops.unary(tape, wide_q), q.item)
    turned_k = ops.cast(tape, ops.unary(tape, wide_k), k.item)
    return turned_q, turned_k
