"""Inputs of the computation of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.choices import Attention, LossKernel, Precision
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.data.row_contents import RowContents
from dstrain.plan.configuration import (
    Checkpointing,
    Configuration,
    Kernels,
    MicroBatch,
    Parallel,
    TrainedModel,
)
from dstrain.plan.memory.layers.attention import AT_ONCE_TOKENS, MOST_APART, as_attended
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
    """ZeRO stage, or as much of PyTorch's own sharding."""
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
        is_needed = self.model.is_deepspeed and needs_reentrant(self.model.method, self.zero_stage)
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
