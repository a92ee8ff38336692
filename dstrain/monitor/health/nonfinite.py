"""Finds values that are not finite and rules that ended a run, and the checkpoint to continue from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import RunFailed
from dstrain.job.schema import HealthAction
from dstrain.monitor.metrics import read_jsonl
from dstrain.rundir import RunDir, lacks_states

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
    """The consequence."""
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


AGAIN = "Continue from an earlier checkpoint or start again, with a lower learning_rate and with bf16 instead of fp16."
"""Advice on a model that is lost."""
_NORMAL = 5
"""Steps at the beginning of a run in fp16 that may be skipped until the scale of the loss is found."""


class Nonfinite:
    """Counts steps with a quantity that is not finite, and ends the run after too many in a row, or in all.

    >>> gradients = Nonfinite("gradients", limit=3)
    >>> for step, is_finite in enumerate([False, False, True, True, True, False], start=1):
    ...     gradients.note(step, is_finite=is_finite)
    >>> gradients.note(7, is_finite=False)
    Traceback (most recent call last):
    dstrain.errors.RunFailed: the gradients of 4 of the last 7 steps, up to step 7, are not finite...
    """

    def __init__(
        self, quantity: str, *, limit: int, tell: Callable[[Sequence[Finding]], None] = lambda findings: None
    ) -> None:
        """`limit` is the number of steps that ends the run, in a row or as more than half of all; 0: unlimited.

        `tell` gets the finding that does.
        """
        self._quantity = quantity
        self._limit = limit
        self._tell = tell
        self._in_a_row = 0
        self._count = self._num_steps = 0
        self._step = 0

    def note(self, step: int, *, is_finite: bool) -> None:
        """Counts the steps since the last call; only one step if that call was finite. Raises RunFailed."""
        if step == self._step:
            return
        since = step - self._step if self._in_a_row else 1
        self._in_a_row = 0 if is_finite else self._in_a_row + since
        self._count += 0 if is_finite else since
        self._num_steps += since
        self._step = step
        if self._limit and self._in_a_row >= self._limit:
            self._end(f"{self._in_a_row} steps in a row", self._in_a_row, since=step - self._in_a_row)
        if self._limit and self._count >= self._limit and 2 * self._count > self._num_steps:
            steps = f"{self._count} of the last {self._num_steps} steps"
            self._end(steps, self._count, since=step - self._num_steps)

    def _end(self, steps: str, count: int, *, since: int) -> None:
        since = max(0, since - 1)  # the update after the last finite gradients may be what broke the weights
        limit = f"({STOP_RULE}: {self._limit})"
        problem = f"the {self._quantity} of {steps}, up to step {self._step}, are not finite {limit}"
        options: dict[str, Any] = {"action": HealthAction.STOP, "since": since}
        self._tell([Finding(rule=STOP_RULE, step=self._step, value=str(count), message=problem, **options)])
        raise RunFailed(
            problem,
            hint=f"Continue from a checkpoint up to step {since} or start again, with a lower learning_rate and "
            f"with bf16 instead of fp16; {STOP_RULE}: 0 never ends a run.",
        )


def require_trained(*, skipped: int, first: int, steps: int, fp16: bool) -> None:
    """Raises RunFailed for a run that has skipped more than half of its steps.

    `first` of them are its first steps: in fp16 a few of these are normal.

    >>> require_trained(skipped=2, first=2, steps=3, fp16=True)
    >>> require_trained(skipped=11, first=0, steps=12, fp16=False)
    Traceback (most recent call last):
    dstrain.errors.RunFailed: 11 of 12 steps were skipped, as their gradients were not finite: the model is not trained
    ...
    """
    normal = min(first, _NORMAL) if fp16 else 0
    if steps and (skipped == steps or 2 * (skipped - normal) > steps - normal):
        problem = f"{skipped} of {steps} steps were skipped, as their gradients were not finite"
        raise RunFailed(f"{problem}: the model is not trained", hint=AGAIN)


def require_finite_loss(what: str, step: int, *, is_finite: bool) -> None:
    """Raises RunFailed for a run of which the last loss is not finite."""
    if not is_finite:
        problem = f"{what} of step {step}, the last one, is not finite: the model is most likely lost"
        raise RunFailed(problem, hint=AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A health rule that ended a run."""

    rule: str
    step: int
    since: int | None
    """The last step before the trouble, which is in later checkpoints; None if checkpoints are unharmed."""


def stop_of(run_dir: RunDir, cause: str) -> Stop | None:
    """Returns the rule that ended a run, given the first line of its failure; None if none did."""
    with suppress(OSError):
        return stop_in(read_jsonl(run_dir.health), cause)
    return None


def stop_in(findings: Sequence[Mapping[str, Any]], cause: str) -> Stop | None:
    """Returns the same from the lines of `health.jsonl`."""
    for line in reversed(findings):
        rule, step, since = (line.get(name) for name in ("rule", "step", "since"))
        if line.get("action") == HealthAction.STOP and isinstance(rule, str) and isinstance(step, int):
            since = since if isinstance(since, int) else None
            return Stop(rule=rule, step=step, since=since) if rule in cause else None
    return None


def usable_checkpoint(run_dir: RunDir, since: int) -> Path | None:
    """Returns the newest complete checkpoint from before the trouble; None if there is none."""
    whole = (folder for step, folder in reversed(run_dir.whole_checkpoints()) if step <= since)
    return next((folder for folder in whole if lacks_states(folder) is None), None)


def error_of(finding: Finding | None, run_dir: RunDir | None, step: int) -> RunFailed:
    """Returns the error with which ranks end a run; only rank 0 knows the finding and the run directory."""
    if finding is None or run_dir is None:
        return RunFailed(f"a health rule ended the run after step {step}")
    hint = "To continue from its checkpoint, add --set resume=auto to the command."
    if finding.since is not None:
        folder = usable_checkpoint(run_dir, finding.since)
        hint = "No checkpoint is from before that: start again" if folder is None else f"Resume from {folder}"
        hint += " with a lower learning_rate; later checkpoints hold the state that went wrong."
    return RunFailed(f"the health rule {finding.rule} ended the run: {finding.message}", hint=hint)
