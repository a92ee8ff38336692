"""Seconds of one forward and backward pass of a micro-batch on one GPU: GEMMs, attention, memory traffic, launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import compress

from dstrain.choices import Attention
from dstrain.facts.data.row_contents import seen_samples
from dstrain.plan.speed.efficiency import (
    CALL_KERNELS,
    GROUPED_RATIO,
    HALF_TILE,
    HALF_WAVE,
    HOOK_S,
    MASKED_ATTENTION_RATIO,
    SHORT_SEQUENCE,
    UNIT_S,
    UNIT_WAIT_S,
    Efficiency,
)
from dstrain.plan.speed.elementwise import bytes_backward, bytes_forward, cached_share
from dstrain.plan.speed.flops import Product
from dstrain.plan.speed.setting import Setting
from dstrain.plan.speed.traffic import Pass, Work
from dstrain.plan.training_code import ExpertLoop


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
        if product.is_in_layer and (s.is_reentrant or is_tiled or not product.is_last):
            again += once
    attention = _attention_seconds(work, rates, s)
    vision, vision_back = _vision_seconds(work, rates, s)
    recomputed = work.forward if s.is_reentrant else work.recompute
    cached = cached_share(work, rates, s)
    moving = bytes_forward(work, s, cached) / rates.hbm_bytes_per_s
    moving_back = bytes_backward(work, s, recomputed, cached) / rates.hbm_bytes_per_s
    launched, launched_back, launched_again = _launched(work, rates, s, recomputed)
    waits = 0.0
    if s.zero_stage == 3 and not s.model.is_deepspeed:
        waits = UNIT_WAIT_S * 2 * work.num_adapters
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
    hooked, hooks = work.num_modules + loop.modules * looped, HOOK_S[s.zero_stage]
    if not s.model.is_deepspeed:
        hooked, hooks = work.num_layers + 1 + 2 * work.num_adapters, UNIT_S if s.zero_stage == 3 else HOOK_S[0]
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
