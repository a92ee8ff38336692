"""Values that are not finite, and too many steps with them in a row (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.errors import RunFailed
from dstrain.job.monitor import HealthAction

STOP_RULE = "stop_on_nonfinite"
"""Id of the finding that ends a run."""
_ADVICE = {
    "loss": "The weights are most likely lost: resume from the last checkpoint with a lower learning_rate, "
    "and with bf16 instead of fp16.",
    "grad_norm": "DeepSpeed skips such a step. With fp16 loss scaling a few are normal; more of them mean a "
    "learning_rate that is too high, or a bad sample.",
    "eval_loss": "The weights are most likely lost: resume from an earlier checkpoint.",
}
"""Metric → advice if it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One warning about a step."""

    rule: str
    """Id, such as `nonfinite_loss`."""
    step: int
    value: str
    message: str
    """Problem and advice."""
    severity: str = "critical"
    """`warning` or `critical`."""
    action: HealthAction = HealthAction.TELL
    """What follows."""
    rank: int | None = None
    """The rank to blame; None if it is no single one's fault, or not known."""
    since: int | None = None
    """The last step before the trouble, if checkpoints from after it hold a state that should not be trained on."""


def check(step: int, values: Mapping[str, Any]) -> list[Finding]:
    """Returns warnings about the metrics of one logged step.

    >>> [finding.rule for finding in check(7, {"loss": float("inf"), "grad_norm": 1.0})]
    ['nonfinite_loss']
    """
    findings = []
    for name, advice in _ADVICE.items():
        value = values.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            message = f"{name} is {value} at step {step}. {advice}"
            findings.append(Finding(rule=f"nonfinite_{name}", step=step, value=str(value), message=message))
    return findings


class Nonfinite:
    """Counts consecutive steps with a quantity that is not finite, and ends the run after too many.

    >>> gradients = Nonfinite("gradients", limit=3)
    >>> for step, is_finite in enumerate([False, False, True, False, False], start=1):
    ...     gradients.note(step, is_finite=is_finite)
    >>> gradients.note(6, is_finite=False)
    Traceback (most recent call last):
    dstrain.errors.RunFailed: the gradients of 3 steps in a row, up to step 6, are not finite (stop_on_nonfinite: 3)
    ...
    """

    def __init__(
        self, quantity: str, *, limit: int, tell: Callable[[Sequence[Finding]], None] = lambda findings: None
    ) -> None:
        """`limit` is the number of steps that ends the run; 0: unlimited. `tell` gets the finding that does."""
        self._quantity = quantity
        self._limit = limit
        self._tell = tell
        self._in_a_row = 0
        self._step = 0

    def note(self, step: int, *, is_finite: bool) -> None:
        """Counts the steps since the last call; only one step if that call was finite.

        Raises RunFailed after `limit` consecutive steps.
        """
        if step == self._step:
            return
        since = step - self._step if self._in_a_row else 1
        self._in_a_row = 0 if is_finite else self._in_a_row + since
        self._step = step
        if self._limit and self._in_a_row >= self._limit:
            problem = (
                f"the {self._quantity} of {self._in_a_row} steps in a row, up to step {step}, are not finite "
                f"({STOP_RULE}: {self._limit})"
            )
            since, value = max(0, step - self._in_a_row), str(self._in_a_row)
            options: dict[str, Any] = {"action": HealthAction.STOP, "since": since}
            self._tell([Finding(rule=STOP_RULE, step=step, value=value, message=problem, **options)])
            raise RunFailed(
                problem,
                hint=f"Continue from a checkpoint up to step {since} or start again, with a lower learning_rate and "
                f"with bf16 instead of fp16; {STOP_RULE}: 0 never ends a run.",
            )
