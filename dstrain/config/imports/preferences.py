"""Converters of settings of training on preferences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dstrain.choices import DpoLoss
from dstrain.config.imports.converters import names, number
from dstrain.config.imports.source import ABSENT, Convert, Converted, OtherTraining, Source

_DPO = ("dpo", "ipo")
"""Words of tools (`stage`, `rlhf_type`, `rl`) for DPO."""
_ELSEWHERE = {"kto": "TRL's KTOTrainer trains by KTO", "rm": "TRL's RewardTrainer trains reward models"}
"""Their words for other trainings on preferences → who has them."""
_SUPERVISED = ("sft", "finetune", "finetuning", "supervised", "instruct")
_PRETRAINING = ("pt", "cpt", "clm", "pretrain", "pretraining")
_OTHERS = (
    *("ppo", "grpo", "gspo", "dapo", "rloo", "orpo", "cpo", "simpo", "mpo", "bco", "rlhf", "rlvr", "prm", "opd"),
    *("gkd", "distill", "distillation", "cls", "classification", "classifier"),
    *("embedding", "reranker", "rerank", "mlm"),
)
_TASK_NAMES = {
    **{name: name for name in (*_DPO, *_ELSEWHERE, *_OTHERS)},
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
    """Returns the task that the names of a script and its folders suggest; the nearest name counts."""
    for name in source.value("script_name", ()):
        for part in reversed(Path(name).parts):
            found = [_TASK_NAMES[word] for word in words_of(part) if word in _TASK_NAMES]
            if found:
                return next((task for task in found if task != "sft"), "sft")
    return None


def name_says(source: Source, words: Iterable[str]) -> bool:
    """Returns whether the name of a script or of its file has one of these words."""
    return any(word in words for name in source.value("script_name", ()) for word in words_of(Path(name).name))


def is_dpo(source: Source) -> bool:
    """Returns whether a tool trains on preferences by DPO."""
    named = (*(source.value(key) for key in ("stage", "rlhf_type", "rl")), named_task(source))
    return source.value("reward_model") is not True and any(name in _DPO for name in named if isinstance(name, str))


def task(value: Any, source: Source) -> Any:
    """Returns the task of a training on preferences. Raises OtherTraining for one that dstrain does not have."""
    name = "rm" if value is True else value  # axolotl's `reward_model: true`
    if name in _DPO:
        return Converted(values={"task": "dpo"} | ({"dpo.loss_type": "ipo"} if name == "ipo" else {}))
    others = _ELSEWHERE.get(str(name), f"of preferences, {' and '.join(_DPO)} are imported")
    raise OtherTraining(f"`{value}`: {others}")


def of_dpo(convert: Convert) -> Convert:
    """Returns a converter of a key that is read for DPO alone."""
    return lambda value, source: convert(value, source) if is_dpo(source) else ABSENT


def _number(value: Any, source: Source) -> Any:
    return ABSENT if value is None else number(value, source)


dpo_number = of_dpo(_number)
"""Converts a number that is read for DPO alone."""


def dpo_loss(value: Any, _: Source) -> str:
    """Returns the loss of DPO. Raises OtherTraining for one that dstrain does not have."""
    (name, *others) = names(value, _)
    if others or name not in tuple(DpoLoss):
        raise OtherTraining(f"`{value}`: dstrain's losses of preferences are {', '.join(DpoLoss)}")
    return name


loss_of_dpo = of_dpo(dpo_loss)
"""Converts a loss that is read for DPO alone."""
