"""Bytes that kernels beside matrix products and flash attention move in a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from dstrain.choices import Attention, LossKernel
from dstrain.plan.memory.layers.losses import tile_rows
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM
from dstrain.plan.speed.efficiency import CACHE_SPEED, CACHED_READS, Efficiency
from dstrain.plan.speed.setting import Setting
from dstrain.plan.speed.traffic import Pass, Work

LOSS_BYTES_PER_LOGIT: Mapping[LossKernel, float] = MappingProxyType(
    {
        LossKernel.FULL: 36.0,
        LossKernel.FUSED: 6.0,
        LossKernel.CHUNKED: 6.0,
    }
)
"""Bytes moved for each logit, forward and backward, beside the head's products. All at once: fp32 copy 6,
log-softmax 8, its gradient 12, the likelihood's gradient and its zeros 4, bf16 gradient 6. Chunked and fused: two reads
and a write. Source: Transformers 5.23 loss/loss_utils.py; deepspeed 0.19.8 runtime/chunked_cross_entropy.py;
liger-kernel 0.8.5 ops/cross_entropy.py."""

FUSED_HEAD_BYTES_PER_WEIGHT = 4.0
"""Bytes for each weight of the head and each chunk of the fused loss, whose gradient is added to the chunk
before. Source: liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py: addmm(out=grad_weight)."""

EAGER_ATTENTION_BYTES = (18.0, 26.0)
"""Bytes of each head and pair of positions in eager attention, forward and backward: scores, mask, fp32 softmax and
its bf16 copy. Source: Transformers 5.23 modeling_llama.py: eager_attention_forward."""

DEQUANTISE_BYTES_PER_PARAM = NF4_BYTES_PER_PARAM + 2
"""Bytes to make a bf16 weight of a 4-bit one, at every use. Source: bitsandbytes autograd/_functions.py: MatMul4Bit
dequantises in its forward and in its backward pass."""

ADDED_PASSES = (4, 2)
"""Times that a pass reads or writes the weights of experts to add their adapters, forward and backward: read and
written, once to see that the shape stays and once for the products; their gradient is read for each factor. The factors
are so thin that their products take less time. Source: peft 0.21 tuners/lora/layer.py: ParamWrapper;
torch 2.13 nn/utils/parametrize.py: ParametrizationList."""

REARRANGED_BYTES = 8.0
"""Bytes of each element that Ulysses sends: copied once before the all-to-all and once after it. Source: deepspeed
0.19.8 runtime/sequence_parallel/ulysses_sp.py: _combine_local_sequences,
_partition_global_sequence."""


def cached_share(work: Work, rates: Efficiency, s: Setting) -> float:
    """Returns the share of the layers' elementwise traffic that passes the level-2 cache, 0…1.

    All reads hit while the cache holds an input and an output of the residual stream in fp32; beyond twice that none.
    """
    held = 2 * 4 * s.tokens * work.hidden_size
    hits = min(1.0, max(0.0, 2 - held / rates.cache_bytes)) if rates.cache_bytes else 0.0
    return 1 - CACHED_READS * hits * (1 - 1 / CACHE_SPEED)


def _moved(part: Pass, s: Setting, cached: float) -> float:
    """Returns the bytes of a pass over all layers that the memory moves."""
    return cached * s.tokens * (part.bytes_per_token + part.sharded_bytes_per_token / s.parallel.tp)


def bytes_forward(work: Work, s: Setting, cached: float) -> float:
    """Returns the bytes that kernels beside products and flash attention move in the forward pass."""
    logits = s.loss_tokens * float(work.vocab_size)
    per_logit = LOSS_BYTES_PER_LOGIT[s.kernels.loss]
    if s.kernels.loss is LossKernel.FULL:
        per_logit += s.code.loss_bytes_per_logit
    total = _moved(work.forward, s, cached) + logits * per_logit
    if s.kernels.loss is LossKernel.FUSED and s.model.is_full:
        tile = s.code.tile_rows(s.tokens, work.hidden_size, work.vocab_size) if s.code.tile_rows else None
        tiles = math.ceil(s.loss_tokens / (tile or tile_rows(s.tokens, work.vocab_size)))
        total += FUSED_HEAD_BYTES_PER_WEIGHT * tiles * work.vocab_size * work.hidden_size
    if s.kernels.attn is Attention.EAGER:
        total += EAGER_ATTENTION_BYTES[0] * s.tokens * s.batch.seq_len * work.num_heads / s.parallel.tp
    total += _rearranged(work, s) + ADDED_PASSES[0] * _adapted_expert_bytes(work, s)
    return total + DEQUANTISE_BYTES_PER_PARAM * work.num_quantized_params + _dequantised_by_tiles(work, s)


def _adapted_expert_bytes(work: Work, s: Setting) -> float:
    """Returns the bytes of the weights of experts that have adapters."""
    return float(s.model.item * sum(p.num_params for p in work.products if p.is_copy and p.experts > 1))


def _dequantised_by_tiles(work: Work, s: Setting) -> float:
    """Returns the bytes to make the MLPs' bf16 weights for every tile but the first, in one pass."""
    if not s.checkpointing.tiled_mlp:
        return 0.0
    tiles = -(-s.tokens // work.hidden_size)
    quantized = sum(product.num_params for product in work.products if product.is_mlp and product.is_quantized)
    return (tiles - 1) * DEQUANTISE_BYTES_PER_PARAM * quantized


def bytes_backward(work: Work, s: Setting, recomputed: Pass, cached: float) -> float:
    """Returns the same of the backward pass; the loss is counted with the forward pass."""
    total = _moved(work.backward, s, cached) + DEQUANTISE_BYTES_PER_PARAM * work.num_quantized_params
    scores = s.tokens * s.batch.seq_len * work.num_heads / s.parallel.tp if s.kernels.attn is Attention.EAGER else 0.0
    total += EAGER_ATTENTION_BYTES[1] * scores
    by_tiles, rearranged = _dequantised_by_tiles(work, s), _rearranged(work, s)
    total += (
        rearranged + (_moved(work.mlps, s, cached) if s.checkpointing.tiled_mlp else 0.0) + 2 * by_tiles
    )  # forward and backward
    again = _moved(recomputed, s, cached) + DEQUANTISE_BYTES_PER_PARAM * work.num_quantized_params + by_tiles
    again += EAGER_ATTENTION_BYTES[0] * scores + rearranged + ADDED_PASSES[0] * _adapted_expert_bytes(work, s)
    total += ADDED_PASSES[1] * _adapted_expert_bytes(work, s)
    return total + s.checkpointing.share(work.num_layers) * again


def _rearranged(work: Work, s: Setting) -> float:
    """Returns the bytes of the copies before and after Ulysses' all-to-alls of queries, keys, values and outputs."""
    if s.parallel.sp == 1:
        return 0.0
    return REARRANGED_BYTES * s.tokens * 2 * (work.query_width + work.key_width) / s.parallel.tp
