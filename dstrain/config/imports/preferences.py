"""Converters of settings of training on preferences."""

from __future__ import annotations

from typing import Any

from dstrain.choices import DpoLoss, Task
from dstrain.config.imports.converters import names, number
from dstrain.config.imports.rows import ABSENT, Convert, Converted, OtherTraining
from dstrain.config.imports.source import Source

_TASKS = {"dpo": Task.DPO, "ipo": Task.DPO, "kto": Task.KTO, "rm": Task.REWARD}
"""What tools train on preferences (`stage`, `rlhf_type`, `rl`) → our task."""


def preference_task(source: Source) -> Task | None:
    """Returns the task of a tool's training on preferences, or None if it is another training."""
    if source.value("reward_model") is True:  # axolotl's; a path in LLaMA-Factory
        return Task.REWARD
    named = (source.value(key) for key in ("stage", "rlhf_type", "rl"))
    return next((_TASKS[name] for name in named if isinstance(name, str) and name in _TASKS), None)


def task(value: Any, source: Source) -> Any:
    """Returns the task of a training on preferences. Raises OtherTraining for one that dstrain does not have."""
    found = preference_task(source)
    if found is None:
        raise OtherTraining(f"`{value}`: of preferences, {', '.join(_TASKS)} are imported")
    values = {"task": found.value} | ({"dpo.loss_type": "ipo"} if value == "ipo" else {})
    return Converted(values=values, note=_SCORE if found is Task.REWARD else "")


_SCORE = "the head is that of Transformers' class for classification, which other tools load"


def of_task(key: str, *tasks: Task) -> Convert:
    """Returns a converter of a number of preferences, which the sections of these tasks have under one key."""

    def converted(value: Any, source: Source) -> Any:
        task = preference_task(source)
        if task not in tasks or value is None:
            return ABSENT
        return Converted(values={f"{task}.{key}": number(value, source)})

    return converted


def zero_for(*tasks: Task) -> Convert:
    """Returns a converter of a weight that dstrain's losses of these tasks do not have."""

    def converted(value: Any, source: Source) -> Any:
        if preference_task(source) in tasks and number(value, source):
            raise OtherTraining(f"`{value}`: another loss of preferences")
        return ABSENT

    return converted


def is_dpo(source: Source) -> bool:
    """Returns whether the tool trains preferences by DPO."""
    return preference_task(source) is Task.DPO


def of_dpo(convert: Convert) -> Convert:
    """Returns a converter of a key that is read for DPO alone."""
    return lambda value, source: convert(value, source) if is_dpo(source) else ABSENT


def dpo_loss(value: Any, _: Source) -> str:
    """Returns the loss of DPO. Raises OtherTraining for one that dstrain does not have."""
    (name, *others) = names(value, _)
    if others or name not in tuple(DpoLoss):
        raise OtherTraining(f"`{value}`: dstrain's losses of preferences are {', '.join(DpoLoss)}")
    return name
