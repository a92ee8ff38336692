"""The parts of a configuration on which the engine's bytes depend: a key for everything that is played once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.plan.configuration import Checkpointing, Configuration, OptimizerStep, Parallel, TrainedModel, Zero

MICRO_STEPS_PLAYED = 3
"""Micro-batches of a step that differ: the first, one in the middle, the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine does depends on these, whatever a micro-batch holds."""

    model: TrainedModel
    step: OptimizerStep
    """The optimizer step, with at most as many micro-batches as differ."""
    zero: Zero
    parallel: Parallel
    checkpointing: Checkpointing

    @property
    def is_reentrant(self) -> bool:
        """Whether recomputation is of the older kind, which adapters under ZeRO-3 need.

        Source: dstrain/train/arguments.py: checkpointing_kwargs; transformers#47254.
        """
        return self.checkpointing.enabled and self.zero.stage == 3 and not self.model.is_full


def settings_of(configuration: Configuration, *, micro_steps: int = MICRO_STEPS_PLAYED) -> Settings:
    """Returns the engine's part of a configuration; `micro_steps` limits the micro-batches of a step."""
    step = configuration.step
    return Settings(
        model=configuration.model,
        step=replace(step, grad_accum=min(step.grad_accum, micro_steps)),
        zero=configuration.zero,
        parallel=configuration.parallel,
        checkpointing=configuration.checkpointing,
    )
