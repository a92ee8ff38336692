"""Seconds of one forward and backward pass of a micro-batch on one GPU: GEMMs, attention, memory traffic, launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from types import MappingProxyType

from dstrain.choices import Attention, LossKernel, Precision
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.workload import RowContents, seen_samples
from dstrain.plan.configuration import (
    Checkpointing,
    Configuration,
    Kernels,
    MicroBatch,
    Parallel,
    TrainedModel,
)
from dstrain.plan.memory.layers.attention import AT_ONCE_TOKENS, MOST_APART, as_attended
from dstrain.plan.memory.layers.losses import tile_rows
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM
from dstrain.plan.speed.efficiency import (
    CACHE_SPEED,
    CACHED_READS,
    CALL_KERNELS,
    GROUPED_RATIO,
    HALF_TILE,
    HALF_WAVE,
    HOOK_S,
    MASKED_ATTENTION_RATIO,
    SHORT_SEQUENCE,
    Efficiency,
)
from dstrain.plan.speed.flops import Product
from dstrain.plan.speed.traffic import Pass, Work
from dstrain.plan.training_code import ExpertLoop, TrainingCode, needs_reentrant


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Inputs of the computation of a micro-batch; a key of the cache."""

    peak_flops_per_s: float
    """Data sheet's dense FLOP/s of the GPU in the precision."""
    has_flash: bool
    """Whether flash attention runs on the GPU."""
    model: TrainedModel
    batch: MicroBatch
    kernels: Kernels
    checkpointing: Checkpointing
    parallel: Parallel
    code: TrainingCode
    zero_stage: int
    """ZeRO stage, or as much of another sharding."""
    attended_tokens: float
    """Tokens over which attention runs: a row, or a sample for which attention is called alone."""
    apart: float
    """Samples of a micro-batch for which attention is called one by one; 0 if one call attends all of them."""
    target_share: float
    """Share of the tokens with a label, 0…1."""
    row_samples: float | None
    """Mean samples of a row; None of packed rows of which it is not known."""

    @property
    def tokens(self) -> int:
        """Tokens of this rank's micro-batch."""
        return max(1, self.batch.tokens // self.parallel.sp)

    @property
    def is_reentrant(self) -> bool:
        """Whether checkpointing computes all of a layer again, as its reentrant form does for adapters under ZeRO-3."""
        is_needed = self.code.sharding is None and needs_reentrant(self.model.method, self.zero_stage)
        return self.code.is_reentrant or is_needed

    @property
    def loss_tokens(self) -> float:
        """Tokens of which the loss computes logits: the fused one leaves out those without a label."""
        return max(1.0, self.tokens * self.target_share) if self.kernels.loss is LossKernel.FUSED else self.tokens

    @property
    def is_masked(self) -> bool:
        """Whether attention gets a mask that flash attention does not take: of padding, or of packed samples."""
        is_padded = self.batch.is_padded and self.code.masks_padding
        masks_samples = not (self.code.splits_packed_rows or self.code.skips_packed_masks)
        has_mask = masks_samples if self.batch.packing else is_padded
        return self.kernels.attn is Attention.SDPA and has_mask and self.parallel.sp == 1


FLASH_ATTENTION_3_SPEED = 1.6
"""Speed of FlashAttention-3 relative to 2 on Hopper, forward and backward pass together, never above matrix
products. Source: arXiv 2407.08608 section 4.1: 1.5 to 2.0 times in the forward pass, 1.5 to 1.75 in the backward pass,
which has 2.5 times as many FLOPs. Version 4 counts as 2, for want of published figures for training."""
FALLBACK_LOOP = ExpertLoop(kernels=(2.0, 4.0), modules=0)
"""Experts where PyTorch has no grouped product: one product for each matrix of an expert, and its two gradients.
Source: Transformers 5.23 integrations/moe.py: _grouped_mm_fallback."""


def setting(configuration: Configuration, peak_flops_per_s: float, gpu: Gpu, contents: RowContents | None) -> Setting:
    """Returns the inputs of the computation of a micro-batch on a GPU."""
    code = configuration.code
    if configuration.kernels.attn is Attention.FLASH_ATTENTION_3 and gpu.compute_capability == (9, 0):
        code = replace(code, attention_speed=code.attention_speed * FLASH_ATTENTION_3_SPEED)
    if not gpu.has_grouped_products and code.expert_loop is None:
        code = replace(code, expert_loop=FALLBACK_LOOP)
    attended_tokens, apart = _attended(configuration, gpu, contents)
    return Setting(
        peak_flops_per_s=peak_flops_per_s,
        has_flash=gpu.has_flash_attention_2 and configuration.model.precision is not Precision.FP32,
        attended_tokens=attended_tokens,
        apart=apart,
        target_share=1.0 if contents is None else contents.target_share,
        row_samples=row_samples(configuration, contents),
        model=configuration.model,
        batch=configuration.batch,
        kernels=configuration.kernels,
        checkpointing=configuration.checkpointing,
        parallel=configuration.parallel,
        code=code,
        zero_stage=configuration.zero.stage,
    )


def row_samples(c: Configuration, contents: RowContents | None) -> float | None:
    """Returns the mean samples of a row; None of packed rows of which it is not known."""
    if not c.batch.packing:
        return 1.0
    return None if contents is None else max(1.0, c.batch.seq_len / contents.sample_tokens)


def _attended(c: Configuration, gpu: Gpu, contents: RowContents | None) -> tuple[float, float]:
    """Returns the tokens over which attention runs, and how many samples of a micro-batch have a call of their own."""
    row, sdpa = float(c.batch.seq_len), c.kernels.attn is Attention.SDPA
    is_apart = c.kernels.attn.is_flash or (sdpa and c.code.splits_packed_rows)
    if contents is None or not c.batch.packing or not is_apart:
        return row, 0.0
    attended, sample = min(row, contents.attended_tokens), min(row, contents.sample_tokens)
    has_kernel = as_attended(c, gpu).code.attends_at_once and c.model.precision is not Precision.FP32
    if not sdpa or (has_kernel and (row <= AT_ONCE_TOKENS or row > MOST_APART * sample)):
        return attended, 0.0
    return attended, c.batch.tokens / sample


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a pass, by what the GPU does."""

    products: float
    """Matrix products."""
    attention: float
    elementwise: float
    """Kernels that only move bytes, the loss included."""
    launches: float
    """Additional time if the CPU takes longer to launch the kernels."""

    @property
    def total(self) -> float:
        """The sum."""
        return self.products + self.attention + self.elementwise + self.launches


@lru_cache(maxsize=4096)
def passes(work: Work, rates: Efficiency, chosen: Setting) -> tuple[Times, Times]:
    """Returns the times of one forward and one backward pass, recomputation included in the latter.

    The GPU works while the CPU launches what comes next, so the slower of the two counts.
    """
    s = chosen
    forward, backward, again = 0.0, 0.0, 0.0
    is_tiled = s.checkpointing.tiled_mlp
    for product in work.products:
        once, gradients = _product_seconds(product, rates, s)
        forward += once
        backward += gradients + (once if is_tiled and product.is_mlp else 0.0)
        # non-reentrant recomputation stops at the last tensor that the backward pass needs
        if product.is_in_layer and (s.is_reentrant or is_tiled or not product.is_last):
            again += once
    attention = _attention_seconds(work, rates, s)
    vision, vision_back = _vision_seconds(work, rates, s)
    recomputed = work.forward if s.is_reentrant else work.recompute
    cached = cached_share(work, rates, s)
    moving = bytes_forward(work, s, cached) / rates.hbm_bytes_per_s
    moving_back = bytes_backward(work, s, recomputed, cached) / rates.hbm_bytes_per_s
    launched, launched_back, launched_again = _launched(work, rates, s, recomputed)
    waits = 0.0 if s.code.sharding is None else s.code.sharding.units(work, s.zero_stage)[2]
    # flash attention: five products back for two forward, since it computes the scores again
    through = 2.5 * attention
    share = s.checkpointing.share(work.num_layers)
    launched_back += share * launched_again
    backward += share * again
    through += share * attention
    is_looped = _loops(work, s)
    waits_back = (1 + share) * waits
    return (
        _times(forward + vision, attention, moving, launched, waits, is_looped),
        _times(backward + vision_back, through, moving_back, launched_back, waits_back, is_looped),
    )


def _times(
    products: float, attention: float, elementwise: float, launched: float, waits: float, is_looped: bool
) -> Times:
    waited = launched if is_looped else max(waits, launched - (products + attention + elementwise))
    return Times(products=products, attention=attention, elementwise=elementwise, launches=waited)


def _loops(work: Work, s: Setting) -> bool:
    """Returns whether the CPU asks the GPU at every expert which tokens visit it, and so can launch nothing ahead."""
    return work.num_experts > 0 and s.code.expert_loop is not None


def _launched(work: Work, rates: Efficiency, s: Setting, recomputed: Pass) -> tuple[float, float, float]:
    """Returns the CPU time of launching a forward pass, a backward pass, and what is computed again."""
    loop, looped = s.code.expert_loop or ExpertLoop(kernels=(0.0, 0.0), modules=0), work.num_experts
    hooked: float = work.num_modules + loop.modules * looped
    hooks = HOOK_S[s.zero_stage]
    if s.code.sharding is not None:
        hooked, hooks, _ = s.code.sharding.units(work, s.zero_stage)
    called = max(0.0, s.apart - 1) * work.num_attention_layers
    there = loop.kernels[0] * looped + CALL_KERNELS[0] * called
    back = loop.kernels[1] * looped + CALL_KERNELS[1] * called
    forward = rates.launch_s * (work.forward.kernels + there) + hooks[0] * hooked
    backward = rates.launch_s * (work.backward.kernels + back) + hooks[1] * hooked
    again = rates.launch_s * (recomputed.kernels + there) + hooks[0] * hooked
    return forward, backward, again


def _product_seconds(product: Product, rates: Efficiency, s: Setting) -> tuple[float, float]:
    """Returns the seconds of a product's forward and backward pass.

    FLOPs over peak × ratio, less where the results fill the last wave of tiles badly; or the bytes of both factors and
    the result over the memory bandwidth, where that takes longer. Trained weights have two products in the backward
    pass, frozen ones one.
    """
    tp = s.parallel.tp if product.is_sharded else 1
    inputs, outputs = product.inputs, product.outputs / tp
    rows = (s.tokens if product.is_in_layer else s.loss_tokens) * product.rows_per_token
    rate, experts = s.peak_flops_per_s * rates.gemm_ratio, float(product.experts)
    if experts > 1:
        experts /= s.parallel.ep  # which as many tokens visit, of all ranks
        per_expert = rows / experts
        rate *= per_expert / (per_expert + HALF_TILE) * (1.0 if s.code.expert_loop else GROUPED_RATIO)
    flops = 2 * rows * inputs * outputs
    weights = inputs * outputs * experts
    moved = s.model.item * (rows * (inputs + outputs) + weights) / rates.hbm_bytes_per_s
    together = experts if s.code.expert_loop else 1.0

    def seconds(results: float) -> float:
        return max(flops / rate * (1 + HALF_WAVE * together / results), moved)

    forward, through = seconds(rows * outputs), seconds(rows * inputs)
    trains = (s.model.is_full and product.trains) or product.is_copy
    gradients = through + (seconds(weights) if trains else 0.0)
    return product.count * forward, product.count * gradients


def _attention_seconds(work: Work, rates: Efficiency, s: Setting) -> float:
    """Returns the seconds of all layers' attention in one forward pass.

    Flash attention and PyTorch's memory-efficient one skip the half above the diagonal. Kernels with a mask, or that
    hold the scores, do not, and a mask rules out flash attention. Attention's speed rises with the length of the
    sequence. A window leaves each token that many before it, in flash attention; SDPA gets a mask for it.
    """
    width, length = work.attention_width / s.parallel.tp, s.attended_tokens
    if s.kernels.attn is Attention.EAGER:
        return 2 * s.tokens * length * width / (s.peak_flops_per_s * rates.gemm_ratio)
    if s.is_masked:
        return _masked_seconds(width, rates, s)
    narrow = work.windowed_share if work.window <= length else 0.0
    seconds = _flash_seconds((1 - narrow) * width, length, length, rates, s)
    if not narrow:
        return seconds
    if s.kernels.attn is Attention.SDPA and (s.apart or not s.batch.packing):
        return seconds + _masked_seconds(narrow * width, rates, s)
    reach = work.window * (2 - work.window / length)
    return seconds + _flash_seconds(narrow * width, reach, work.window, rates, s)


def _masked_seconds(width: float, rates: Efficiency, s: Setting) -> float:
    """Returns the seconds of attention that takes a mask, over all positions of a row or of a sample."""
    flops = 2 * s.tokens * s.attended_tokens * width
    return flops / (_attention_rate(s.attended_tokens, rates, s) * (MASKED_ATTENTION_RATIO if s.has_flash else 1.0))


def _flash_seconds(width: float, reach: float, length: float, rates: Efficiency, s: Setting) -> float:
    """Returns the seconds of attention without a mask: each token reaches half of `reach` tokens on average, at the
    speed of sequences of `length`."""
    fastest = max(1.0, rates.gemm_ratio / rates.attention_ratio)
    return s.tokens * reach * width / (_attention_rate(length, rates, s) * min(s.code.attention_speed, fastest))


def _attention_rate(length: float, rates: Efficiency, s: Setting) -> float:
    """Returns the FLOP/s of attention over sequences of a length."""
    return s.peak_flops_per_s * rates.attention_ratio * length / (length + SHORT_SEQUENCE)


def _vision_seconds(work: Work, rates: Efficiency, s: Setting) -> tuple[float, float]:
    """Returns the seconds of the vision tower's forward and backward pass.

    Frozen blocks have no backward pass. Trained ones have two products for each of the forward pass, and 2.5 times its
    attention; with checkpointing they run forward again. Packed rows hold the images of their samples; if the number of
    these is not known, of as many as fit.
    """
    products = work.vision_products
    if not s.batch.image_patches or not products:
        return 0.0, 0.0
    per_token = round(1 / min(product.rows_per_token for product in products))
    most = seen_samples(s.batch.seq_len, s.batch.image_patches, per_token, is_packed=s.batch.packing)
    patches = s.batch.rows * s.batch.image_patches * (most if s.row_samples is None else min(most, s.row_samples))
    rate = s.peak_flops_per_s * rates.gemm_ratio
    seconds = [2 * p.inputs * p.outputs * p.count * p.rows_per_token * patches / rate for p in products]
    flops = 0.0 if work.vision is None else work.vision.attention_flops(s.batch.image_patches)
    attention = patches * flops / (s.peak_flops_per_s * rates.attention_ratio)
    of_blocks = [product.rows_per_token == 1 for product in products]
    trains = [s.model.is_full and product.trains for product in products]
    forward, weights = sum(seconds) + attention, sum(compress(seconds, trains))
    if not any(compress(of_blocks, trains)):
        return forward, 2 * weights
    again = sum(compress(seconds, of_blocks)) + attention if s.checkpointing.enabled else 0.0
    return forward, weights + sum(seconds) + 2.5 * attention + again
