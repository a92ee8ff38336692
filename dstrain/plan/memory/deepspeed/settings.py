"""The parts of a configuration on which the engine's bytes depend: a key for everything that is played once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.plan.configuration import Checkpointing, Configuration, OptimizerStep, Parallel, TrainedModel, Zero
from dstrain.plan.memory.optimizer_states import are_early
from dstrain.plan.training_code import needs_reentrant

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
    checkpointing: Checkpointing
    has_early_states: bool
    """Whether the optimizer states are allocated before the first step."""

    @property
    def is_reentrant(self) -> bool:
        """Whether recomputation is of the older kind, which adapters under ZeRO-3 need."""
        return self.checkpointing.enabled and needs_reentrant(self.model.method, self.zero.stage)


def settings_of(configuration: Configuration) -> Settings:
    """Returns the engine's part of a configuration."""
    return Settings(
        model=configuration.model,
        step=replace(configuration.step, grad_accum=micro_batches_played(configuration)),
        zero=configuration.zero,
        parallel=configuration.parallel,
        checkpointing=configuration.checkpointing,
        has_early_states=are_early(configuration),
    )


def micro_batches_played(configuration: Configuration) -> int:
    """Returns how many micro-batches of a step are played: at most as many as differ."""
    zero, is_deepspeed = configuration.zero, configuration.model.is_deepspeed
    most = MICRO_BATCHES_PLAYED if zero.stage < 3 or zero.hpz > 1 or not is_deepspeed else 1
    return min(configuration.step.grad_accum, most)
