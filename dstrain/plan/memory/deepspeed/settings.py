"""The parts of a configuration on which the engine's bytes depend: a key for everything that is played once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.choices import Offload, Precision
from dstrain.plan.configuration import DEFAULTS, Configuration, OptimizerStep, Parallel, TrainedModel, Zero
from dstrain.plan.memory.layers.ops import FP32
from dstrain.plan.memory.optimizer_states import are_early, master_item

MICRO_BATCHES_PLAYED = 2
"""Micro-batches of a step that differ: the first, and the last, which finds gradients. Under ZeRO-3, which has room for
them from the beginning, only ZeRO++'s secondary partitions make a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The engine's behaviour depends on these, whatever a micro-batch holds."""

    model: TrainedModel
    step: OptimizerStep
    """The optimizer step, with at most as many micro-batches as differ."""
    zero: Zero
    parallel: Parallel
    has_early_states: bool
    """Whether the optimizer states are allocated before the first step."""

    @property
    def accumulated(self) -> int:
        """Bytes of an element of accumulated gradients."""
        return (self.step.grad_accum_dtype or self.model.precision).num_bytes

    @property
    def communicated(self) -> int:
        """Bytes of an element of a gradient while ranks exchange it: fp32 if they share sequences.

        Source: deepspeed 0.19.8 runtime/engine.py: communication_data_type; runtime/constants.py:
        SEQ_PARALLEL_COMMUNICATION_DATA_TYPE.
        """
        return FP32 if self.parallel.sp > 1 else self.model.item

    @property
    def stepped(self) -> int:
        """Bytes of an element of master weights, and of the gradients that step them."""
        return master_item(self.step.optimizer)

    @property
    def is_wide(self) -> bool:
        """Whether ZeRO-1 runs on DeepSpeed's BF16_Optimizer, which keeps whole fp32 gradients.

        Source: deepspeed 0.19.8 runtime/engine.py: _do_optimizer_sanity_check.
        """
        return (
            self.zero.stage == 1
            and self.model.precision is Precision.BF16
            and self.step.grad_accum_dtype is Precision.FP32
            and not self.zero.is_offloaded
        )

    def before_step(self, num_ranks: int) -> Settings:
        """Returns the settings of forward and backward on so many ranks, with defaults for the step's own.

        Configurations that differ in these alone share a replay. Parameters off the GPU are gathered like others,
        unless a rank has one alone and copies it.
        """
        zero, plain = self.zero, DEFAULTS.zero
        offload = Offload.OPTIMIZER if zero.is_offloaded else Offload.NONE
        if zero.offloads_params and num_ranks <= self.parallel.ep:
            offload = Offload.PARAMS
        used = replace(
            zero,
            offload=offload,
            offload_ratio=1.0,
            pin_memory=plain.pin_memory,
            sub_group_size=plain.sub_group_size,
        )
        # gradients know only whether sequences are shared (`communicated`)
        parallel = replace(self.parallel, sp=min(self.parallel.sp, 2))
        return replace(self, zero=used, parallel=parallel, has_early_states=False)


def settings_of(configuration: Configuration) -> Settings:
    """Returns the engine's part of a configuration."""
    return Settings(
        model=configuration.model,
        step=replace(configuration.step, grad_accum=micro_batches_played(configuration)),
        zero=configuration.zero,
        parallel=configuration.parallel,
        has_early_states=are_early(configuration),
    )


def micro_batches_played(configuration: Configuration) -> int:
    """Returns how many micro-batches of a step are played: at most as many as differ."""
    zero = configuration.zero
    most = MICRO_BATCHES_PLAYED if zero.stage < 3 or zero.hpz > 1 else 1
    return min(configuration.step.grad_accum, most)
