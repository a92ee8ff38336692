"""Seconds of one forward and backward pass of a micro-batch on one GPU: GEMMs, attention, memory traffic, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from dstrain.choices import Attention, LossKernel, Precision
from dstrain.plan.configuration import (
    Checkpointing,
    Configuration,
    Kernels,
    MicroBatch,
    Parallel,
    TrainedModel,
)
from dstrain.plan.memory.layers.losses import TILED_HEADS, tile_rows
from dstrain.plan.memory.params import NF4_BYTES_PER_PARAM
from dstrain.plan.speed.efficiency import (
    GROUPED_RATIO,
    HALF_TILE,
    HALF_WAVE,
    HOOK_S,
    MASKED_ATTENTION_RATIO,
    SHORT_SEQUENCE,
    UNIT_S,
    Efficiency,
)
from dstrain.plan.speed.flops import Product
from dstrain.plan.speed.traffic import Pass, Work
from dstrain.plan.training_code import ExpertLoop, TrainingCode

LOSS_BYTES_PER_LOGIT: Mapping[LossKernel, float] = MappingProxyType(
    {
        LossKernel.FULL: 36.0,
        LossKernel.IN_PLACE: 6.0,
        LossKernel.TILED: 36.0,
        LossKernel.FUSED: 6.0,
        LossKernel.LIGER: 6.0,
        LossKernel.CHUNKED: 6.0,
    }
)
"""Bytes moved for each logit, forward and backward, beside the head's products. All at once or in tiles: fp32 copy 6,
log-softmax 8, its gradient 12, that of the likelihood and its zeros 4, bf16 gradient 6. Chunked, in place and fused:
two reads and a write. Source: Transformers 5.23 loss/loss_utils.py; deepspeed 0.19.8 runtime/chunked_cross_entropy.py;
liger-kernel 0.8.5 ops/cross_entropy.py."""

FUSED_HEAD_BYTES_PER_WEIGHT = 4.0
"""Bytes for each weight of the head and each chunk of the fused loss, whose gradient is added to that of the chunk
before. Source: liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py: addmm(out=grad_weight)."""

EAGER_ATTENTION_BYTES = (18.0, 26.0)
"""Bytes of each head and pair of positions in eager attention, forward and backward: scores, mask, fp32 softmax and
its bf16 copy. Source: Transformers 5.23 modeling_llama.py: eager_attention_forward."""

DEQUANTISE_BYTES_PER_PARAM = NF4_BYTES_PER_PARAM + 2
"""Bytes to make a bf16 weight of a 4-bit one, at every use. Source: bitsandbytes autograd/_functions.py: MatMul4Bit
dequantises in its forward and in its backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the computation of a micro-batch depends on; a key of the cache."""

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
    """ZeRO stage, or as much of PyTorch's own sharding."""

    @property
    def tokens(self) -> int:
        """Tokens of this rank's micro-batch."""
        return max(1, self.batch.tokens // self.parallel.sp)

    @property
    def is_reentrant(self) -> bool:
        """Whether checkpointing computes all of a layer again, as its reentrant form does for adapters under ZeRO-3."""
        adapter_under_zero3 = not self.model.is_full and self.zero_stage == 3 and self.model.is_deepspeed
        return self.code.is_reentrant or adapter_under_zero3

    @property
    def is_masked(self) -> bool:
        """Whether attention gets a mask that flash attention does not take: of padding, or of packed samples."""
        is_padded = self.batch.is_padded and self.code.masks_padding
        masks_samples = not (self.code.splits_packed_rows or self.code.skips_packed_masks)
        has_mask = masks_samples if self.batch.packing else is_padded
        return self.kernels.attn is Attention.SDPA and has_mask and self.parallel.sp == 1


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


def setting(configuration: Configuration, peak_flops_per_s: float, has_flash: bool) -> Setting:
    """Returns what the computation of a micro-batch depends on."""
    return Setting(
        peak_flops_per_s=peak_flops_per_s,
        has_flash=has_flash and configuration.model.precision is not Precision.FP32,
        model=configuration.model,
        batch=configuration.batch,
        kernels=configuration.kernels,
        checkpointing=configuration.checkpointing,
        parallel=configuration.parallel,
        code=configuration.code,
        zero_stage=configuration.zero.stage,
    )


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
        if product.is_in_layer and (s.is_reentrant or is_tiled or not product.is_last):
            again += once
    attention = _attention_seconds(work, rates, s)
    vision = _vision_seconds(work, rates, s)
    recomputed = work.forward if s.is_reentrant else work.recompute
    bytes_forward, bytes_backward = _bytes_forward(work, s), _bytes_backward(work, s, recomputed)
    launched, launched_back, launched_again = _launched(work, rates, s, recomputed)
    through = 2.5 * attention
    share = s.checkpointing.share(work.num_layers)
    launched_back += share * launched_again
    backward += share * again
    through += share * attention
    return (
        _times(forward + vision, attention, bytes_forward / rates.hbm_bytes_per_s, launched, _loops(work, s)),
        _times(backward, through, bytes_backward / rates.hbm_bytes_per_s, launched_back, _loops(work, s)),
    )


def _times(products: float, attention: float, elementwise: float, launched: float, is_looped: bool) -> Times:
    waited = launched if is_looped else max(0.0, launched - (products + attention + elementwise))
    return Times(products=products, attention=attention, elementwise=elementwise, launches=waited)


def _loops(work: Work, s: Setting) -> bool:
    """Returns whether the CPU asks the GPU at every expert which tokens visit it, and so can launch nothing ahead."""
    return work.num_experts > 0 and s.code.expert_loop is not None


def _launched(work: Work, rates: Efficiency, s: Setting, recomputed: Pass) -> tuple[float, float, float]:
    """Returns the CPU time of launching a forward pass, a backward pass, and what is computed again."""
    loop, looped = s.code.expert_loop or ExpertLoop(kernels=(0.0, 0.0), modules=0), work.num_experts
    hooked, hooks = work.num_modules + loop.modules * looped, HOOK_S[s.zero_stage]
    if not s.model.is_deepspeed:
        hooked, hooks = work.num_layers + 1 + 2 * work.num_adapters, UNIT_S if s.zero_stage == 3 else HOOK_S[0]
    forward = rates.launch_s * (work.forward.kernels + loop.kernels[0] * looped) + hooks[0] * hooked
    backward = rates.launch_s * (work.backward.kernels + loop.kernels[1] * looped) + hooks[1] * hooked
    again = rates.launch_s * (recomputed.kernels + loop.kernels[0] * looped) + hooks[0] * hooked
    return forward, backward, again


def _product_seconds(product: Product, rates: Efficiency, s: Setting) -> tuple[float, float]:
    """Returns the seconds of a product's forward and backward pass.

    FLOPs over peak × ratio, less where the results fill the last wave of tiles badly; or the bytes of both factors and
    the result over the memory bandwidth, where that takes longer. Trained weights have two products in the backward
    pass, frozen ones one.
    """
    tp = s.parallel.tp if product.is_sharded else 1
    inputs, outputs = product.inputs, product.outputs / tp
    rows = s.tokens * product.rows_per_token
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
    gradients = through + (seconds(weights) if s.model.is_full else 0.0)
    return product.count * forward, product.count * gradients


def _attention_seconds(work: Work, rates: Efficiency, s: Setting) -> float:
    """Returns the seconds of all layers' attention in one forward pass.

    Both flash attention and PyTorch's memory-efficient one skip the half above the diagonal; what takes a mask, or
    holds the scores, does not, and a mask rules out flash attention. Attention's speed rises with the length of the
    sequence.
    """
    flops = s.tokens * s.batch.seq_len * work.attention_width / s.parallel.tp
    if s.kernels.attn is Attention.EAGER:
        return 2 * flops / (s.peak_flops_per_s * rates.gemm_ratio)
    rate = s.peak_flops_per_s * rates.attention_ratio * s.batch.seq_len / (s.batch.seq_len + SHORT_SEQUENCE)
    if s.is_masked:
        return 2 * flops / (rate * (MASKED_ATTENTION_RATIO if s.has_flash else 1.0))
    return flops / rate


def _vision_seconds(work: Work, rates: Efficiency, s: Setting) -> float:
    """Returns the seconds of the frozen vision tower, which runs forward only."""
    patches = s.batch.micro_batch * s.batch.image_patches
    if not patches:
        return 0.0
    flops = sum(2 * p.inputs * p.outputs * p.count * p.rows_per_token for p in work.vision_products) * patches
    attention = 2 * patches * s.batch.image_patches * work.vision_width
    peak = s.peak_flops_per_s
    return flops / (peak * rates.gemm_ratio) + attention / (peak * rates.attention_ratio)


def _moved(part: Pass, s: Setting) -> float:
    """Returns the bytes of a pass over all layers."""
    return s.tokens * (part.bytes_per_token + part.sharded_bytes_per_token / s.parallel.tp)


def _bytes_forward(work: Work, s: Setting) -> float:
    """Returns the bytes that kernels beside products and flash attention move in the forward pass."""
    logits = s.tokens * float(work.vocab_size)
    per_logit = LOSS_BYTES_PER_LOGIT[s.kernels.loss]
    if s.kernels.loss is LossKernel.FULL:
        per_logit += s.code.loss_bytes_per_logit
    total = _moved(work.forward, s) + logits * per_logit
    if s.kernels.loss in TILED_HEADS and s.model.is_full:
        tiles = -(-s.tokens // tile_rows(s.kernels.loss, s.tokens, work.hidden_size, work.vocab_size))
        total += FUSED_HEAD_BYTES_PER_WEIGHT * tiles * work.vocab_size * work.hidden_size
    if s.kernels.attn is Attention.EAGER:
        total += EAGER_ATTENTION_BYTES[0] * s.tokens * s.batch.seq_len * work.num_heads / s.parallel.tp
    return total + DEQUANTISE_BYTES_PER_PARAM * work.num_quantized_params + _dequantised_by_tiles(work, s)


def _dequantised_by_tiles(work: Work, s: Setting) -> float:
    """Returns the bytes to make the MLPs' bf16 weights for every tile but the first, in one pass."""
    if not s.checkpointing.tiled_mlp:
        return 0.0
    tiles = -(-s.tokens // work.hidden_size)
    quantized = sum(product.num_params for product in work.products if product.is_mlp and product.is_quantized)
    return (tiles - 1) * DEQUANTISE_BYTES_PER_PARAM * quantized


def _bytes_backward(work: Work, s: Setting, recomputed: Pass) -> float:
    """Returns the same of the backward pass; the loss is counted with the forward pass."""
    total = _moved(work.backward, s) + DEQUANTISE_BYTES_PER_PARAM * work.num_quantized_params
    scores = s.tokens * s.batch.seq_len * work.num_heads / s.parallel.tp if s.kernels.attn is Attention.EAGER else 0.0
    total += EAGER_ATTENTION_BYTES[1] * scores
    by_tiles = _dequantised_by_tiles(work, s)
    total += (_moved(work.mlps, s) if s.checkpointing.tiled_mlp else 0.0) + 2 * by_tiles  # forward and backward
    again = _moved(recomputed, s) + DEQUANTISE_BYTES_PER_PARAM * work.num_quantized_params + by_tiles
    again += EAGER_ATTENTION_BYTES[0] * scores
    return total + s.checkpointing.share(work.num_layers) * again
