"""The sections of a job file about watching a run: where metrics go, and limits of health rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.choices import HealthAction, SinkName, SwanLabMode
from dstrain.records import type_config


class NotifyService(StrEnum):
    """Where notices about a run go."""

    FEISHU = "feishu"
    DINGTALK = "dingtalk"
    WECOM = "wecom"
    SLACK = "slack"
    WEBHOOK = "webhook"
    MAIL = "mail"


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
    notify: tuple[NotifyService, ...] = ()
    """Who hears of start, trouble, failure and end: `feishu`, `dingtalk`, `wecom`, `slack`, `webhook`, `mail`."""


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
    """What follows at the highest level: `tell`, `save` (a checkpoint too), or `stop` (save and end the run)."""
