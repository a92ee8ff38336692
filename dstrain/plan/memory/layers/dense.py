"""Dense decoder layers: attention, latent attention too, and MLP of each family."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.plan.memory.layers import attention, blocks, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Tensor, Tensors

Block = Callable[[Context, Tensor], Tensor]
Norm = Callable[[Context, Tensor, int], Tensor]


def plain_attention(run: Context, x: Tensor) -> Tensor:
    """Llama's attention: grouped queries, separate projections."""
    q, k, v = _projected(run, x)
    q, k = blocks.rotary(run, q, k)
    return _output(run, q, k, v)


def qwen3_attention(run: Context, x: Tensor) -> Tensor:
    """Attention that normalises queries and keys directly after their projections."""
    width = run.model.head_dim
    q = blocks.rms_norm(run, _by_head(run, x, "self_attn.q_proj"), width)
    k = blocks.rms_norm(run, _by_head(run, x, "self_attn.k_proj"), width)
    v = run.linear(x, "self_attn.v_proj", shards="columns")
    q, k = blocks.rotary(run, q, k)
    return _output(run, q, k, v)


def gemma3_attention(run: Context, x: Tensor) -> Tensor:
    """Attention with Gemma's norm, after all three projections."""
    width = run.model.head_dim
    q, k, v = _projected(run, x)
    q = blocks.gemma_norm(run, q, width)
    k = blocks.gemma_norm(run, k, width)
    q, k = blocks.rotary(run, q, k)
    return _output(run, q, k, v)


def fused_attention(run: Context, x: Tensor) -> Tensor:
    """Phi-3's attention: one matrix makes queries, keys and values, which are views of its result."""
    model, tp = run.model, run.variant.parallel.tp
    both = run.linear(x, "self_attn.qkv_proj", shards="columns")
    queries = run.rows * model.num_attention_heads * model.head_dim // tp
    keys = (both.numel - queries) // 2
    q, k, v = (ops.cut(run.tape, both, numel) for numel in (queries, keys, keys))
    q, k = blocks.partial_rotary(run, blocks.by_head(run, q), blocks.by_head(run, k))
    return _output(run, q, k, v, is_cat=not run.kernels.rotary)


def glm_attention(run: Context, x: Tensor) -> Tensor:
    """Attention that rotates a part of each head."""
    q, k, v = _projected(run, x)
    q, k = blocks.partial_rotary(run, q, k, interleaves=True)
    return _output(run, q, k, v, is_cat=True)


def _projected(run: Context, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = _by_head(run, x, "self_attn.q_proj"), _by_head(run, x, "self_attn.k_proj")
    return q, k, run.linear(x, "self_attn.v_proj", shards="columns")


def _by_head(run: Context, x: Tensor, name: str) -> Tensor:
    return blocks.by_head(run, run.linear(x, name, shards="columns"))


def _output(run: Context, q: Tensor, k: Tensor, v: Tensor, *, is_cat: bool = False) -> Tensor:
    """Attends and projects back."""
    heads = run.model.num_attention_heads // run.variant.parallel.tp
    output = attention.self_attention(run, q, k, v, heads, is_cat=is_cat)
    return run.linear(output, "self_attn.o_proj", shards="rows")


def prenorm(run: Context, x: Tensor, attend: Block, mlp: Block) -> Tensor:
    """Llama's layer: norm, attention, sum; norm, MLP, sum."""
    tape, width = run.tape, run.model.hidden_size
    hidden = blocks.rms_norm(run, x, width)
    hidden = attend(run, hidden)
    hidden = ops.add(tape, x, hidden)
    x = hidden
    hidden = blocks.rms_norm(run, x, width)
    hidden = mlp(run, hidden)
    return ops.add(tape, x, hidden)


def sandwich(run: Context, x: Tensor, attend: Block, mlp: Block, norm: Norm) -> Tensor:
    """Gemma 3's and GLM-4-0414's layer: a norm before and after attention and MLP."""
    tape, width = run.tape, run.model.hidden_size
    hidden = norm(run, x, width)
    hidden = attend(run, hidden)
    hidden = norm(run, hidden, width)
    hidden = ops.add(tape, x, hidden)
    x = hidden
    hidden = norm(run, x, width)
    hidden = mlp(run, hidden)
    hidden = norm(run, hidden, width)
    return ops.add(tape, x, hidden)


def granite(run: Context, x: Tensor) -> Tensor:
    """Granite's layer: Llama's, with what is added to the residual stream multiplied by a constant."""
    tape, width = run.tape, run.model.hidden_size
    hidden = blocks.rms_norm(run, x, width)
    hidden = plain_attention(run, hidden)
    hidden = ops.add(tape, x, ops.unary(tape, hidden))
    x = hidden
    hidden = blocks.rms_norm(run, x, width)
    hidden = blocks.gated_mlp(run, hidden)
    return ops.add(tape, x, ops.unary(tape, hidden))


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
        # the slice that was overwritten has a gradient, too: zeros, which are copied in
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
