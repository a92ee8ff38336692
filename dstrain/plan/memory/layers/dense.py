"""Dense decoder layers: attention and MLP of each family."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.plan.memory.layers import attention, blocks, ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tensor import Tensor

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
