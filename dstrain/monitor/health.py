"""What looks wrong in a logged step (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ADVICE = {
    "loss": "The weights are most likely lost: go back to the last checkpoint with a lower learning_rate, "
    "and with bf16 instead of fp16.",
    "grad_norm": "DeepSpeed leaves out such a step, and with fp16's loss scaling a few are normal; more of them mean a "
    "learning_rate that is too high, or a bad sample.",
    "eval_loss": "The weights are most likely lost: go back to an earlier checkpoint.",
}
"""Quantity → what to do when it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that looks wrong."""

    rule: str
    """What was looked at, such as `nonfinite_loss`."""
    step: int
    """The step that was logged."""
    value: str
    """What was found."""
    message: str
    """What it is, and what to do."""


def check(step: int, values: Mapping[str, Any]) -> list[Finding]:
    """Returns what looks wrong in the values of one logged step.

    >>> [found.rule for found in check(7, {"loss": float("inf"), "grad_norm": 1.0})]
    ['nonfinite_loss']
    """
    found = []
    for name, advice in _ADVICE.items():
        value = values.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            message = f"{name} is {value} at step {step}. {advice}"
            found.append(Finding(rule=f"nonfinite_{name}", step=step, value=str(value), message=message))
    return found
