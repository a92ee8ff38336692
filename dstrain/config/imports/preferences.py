"""Converters of settings of training on preferences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dstrain.choices import DpoLoss, Task
from dstrain.config.imports.converters import names, number
from dstrain.config.imports.source import ABSENT, Convert, Converted, OtherTraining, Source

_TASKS = {"dpo": Task.DPO, "ipo": Task.DPO, "kto": Task.KTO, "rm": Task.REWARD}
"""What tools train on preferences (`stage`, `rlhf_type`, `rl`) → our task."""


_SUPERVISED = ("sft", "finetune", "finetuning", "supervised", "instruct")
_PRETRAINING = ("pt", "cpt", "clm", "pretrain", "pretraining")
_OTHERS = (
    *("ppo", "grpo", "gspo", "dapo", "rloo", "orpo", "cpo", "simpo", "mpo", "bco", "rlhf", "rlvr", "prm", "opd"),
    *(
        "gkd",
        "distill",
        "distillation",
        "cls",
        "classification",
        "classifier",
        "embedding",
        "reranker",
        "rerank",
        "mlm",
    ),
)
_TASK_NAMES = {
    **{name: name for name in (*_TASKS, *_OTHERS)},
    **dict.fromkeys(("reward", "rewards"), "rm"),
    **dict.fromkeys(_PRETRAINING, "pt"),
    **dict.fromkeys(_SUPERVISED, "sft"),
}
"""Words in the names of scripts and folders → what they train."""
TRL = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
"""The verbs of `trl`."""
ADAPTERS = ("lora", "qlora", "peft", "adapter")


def words_of(name: str) -> list[str]:
    """Returns the words of a name.

    >>> words_of("train_dpoLora-v2.py")
    ['train', 'dpo', 'lora', 'v2', 'py']
    """
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def named_task(source: Source) -> str | None:
    """Returns what the names of a script and of its folders say that it trains; the nearest one that says something."""
    for name in source.value("script_name", ()):
        for part in reversed(Path(name).parts):
            found = [_TASK_NAMES[word] for word in words_of(part) if word in _TASK_NAMES]
            if found:
                return next((task for task in found if task != "sft"), "sft")
    return None


def name_says(source: Source, words: Iterable[str]) -> bool:
    """Returns whether the name of a script, or that of its file, has one of these words."""
    return any(word in words for name in source.value("script_name", ()) for word in words_of(Path(name).name))


def preference_task(source: Source) -> Task | None:
    """Returns the task of a tool's training on preferences, or None if it is another training."""
    if source.value("reward_model") is True:  # axolotl's; a path in LLaMA-Factory
        return Task.REWARD
    named = (*(source.value(key) for key in ("stage", "rlhf_type", "rl")), named_task(source))
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
