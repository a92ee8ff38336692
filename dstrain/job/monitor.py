"""The sections of a job file about watching a run: where metrics go, generated texts, and limits of health rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt

from dstrain.choices import SinkName, SwanLabMode
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Destinations of metrics besides `metrics.jsonl`, which is always written."""

    __pydantic_config__ = type_config

    sinks: tuple[SinkName, ...] = (SinkName.SWANLAB,)
    """Any of `swanlab`, `tensorboard`, `wandb`."""
    mode: SwanLabMode | None = None
    """SwanLab's mode: `online`, `offline`, `local` or `disabled`; default: `online` with an API key, else `offline`."""
    project: str = "dstrain"
    """Project name in SwanLab and W&B."""
    name: str | None = None
    """Name of the run; default: `MODEL-METHOD-GPUSxGPU-ZEROn`, such as `qwen3-8b-lora-4x4090-zero2`."""
    collectives: bool = True
    """Whether each rank measures its collectives; `false` leaves PyTorch's functions as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Texts that the model generates as training goes, greedily."""

    __pydantic_config__ = type_config

    prompts: tuple[str, ...] = ()
    """Questions, which get the chat template; with `task: pretrain`, or without a template, beginnings of texts."""
    eval_prompts: Annotated[int, Ge(0)] = 0
    """Number of evaluation samples, from the first one, of which the part before the first answer is a prompt, too."""
    generate_every: Annotated[int, Gt(0)] | None = None
    """Optimizer steps between generations; default: at each evaluation."""
    max_new_tokens: Annotated[int, Gt(0)] = 128
    """Tokens of a generated text, at most."""


class HealthRule(StrEnum):
    """A rule about a running training, by what it detects."""

    LOSS_SPIKE = "loss_spike"
    ZERO_LOSS = "zero_loss"
    FIRST_LOSS = "first_loss"
    ABOVE_GUESSING = "above_guessing"
    OVERFITTING = "overfitting"
    ALWAYS_CLIPPED = "always_clipped"
    VANISHED_GRADIENT = "vanished_gradient"
    SKIPPED_STEPS = "skipped_steps"
    PLATEAU = "plateau"
    RESUMED_LOSS = "resumed_loss"
    MASKED_SAMPLES = "masked_samples"
    BUSIEST_EXPERT = "busiest_expert"
    DEAD_EXPERTS = "dead_experts"
    SLOWDOWN = "slowdown"
    SLOW_RANK = "slow_rank"
    BUS_BANDWIDTH = "bus_bandwidth"
    DATA_WAIT = "data_wait"
    PADDING = "padding"
    SLOW_CHECKPOINT = "slow_checkpoint"
    MEMORY_GROWTH = "memory_growth"


class HealthAction(StrEnum):
    """Consequence of a broken health rule."""

    TELL = "tell"
    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Limits and consequences of one health rule."""

    __pydantic_config__ = type_config

    enabled: bool = True
    """Whether the rule is checked."""
    warn: float | None = None
    """The signal from which it is a warning; default: the rule's."""
    critical: float | None = None
    """The signal from which it is critical; default: the rule's."""
    action: HealthAction = HealthAction.TELL
    """Consequence at the highest level: `tell`, `save` (a checkpoint too), or `stop` (save and end the run)."""
