"""What looks wrong in a logged step."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest

from dstrain.errors import RunFailed
from dstrain.monitor.health.nonfinite import Nonfinite, check, require_finite_loss, require_trained


def test_a_loss_or_a_gradient_norm_that_is_not_finite_is_found() -> None:
    (found,) = check(3, {"loss": float("nan"), "grad_norm": 1.0})
    assert (found.rule, found.step, found.value) == ("nonfinite_loss", 3, "nan")
    assert "learning_rate" in found.message
    assert [found.rule for found in check(1, {"loss": 1.0, "grad_norm": float("inf")})] == ["nonfinite_grad_norm"]
    assert check(1, {"loss": 1.0, "grad_norm": 0.5, "learning_rate": 0.0}) == []


@pytest.mark.parametrize(
    ("skipped", "first", "steps", "fp16", "fails"),
    [
        *((0, 0, 12, False, False), (6, 0, 12, False, False)),
        *((5, 5, 8, True, False), (2, 2, 3, True, False)),  # the scale of the loss is found in the first steps
        (15, 15, 100, True, False),
        (0, 0, 0, False, False),  # resumed at its last step
        *((11, 0, 12, False, True), (7, 0, 12, False, True), (11, 11, 12, True, True)),
        *((3, 3, 3, True, True), (2, 2, 3, False, True), (9, 4, 12, True, True)),
    ],
)
def test_a_run_that_skipped_most_of_its_steps_has_failed(
    skipped: int, first: int, steps: int, fp16: bool, fails: bool
) -> None:
    said = f"{skipped} of {steps} steps were skipped"
    with pytest.raises(RunFailed, match=said) if fails else nullcontext():
        require_trained(skipped=skipped, first=first, steps=steps, fp16=fp16)


def test_every_other_step_does_not_end_a_run_and_two_of_three_do() -> None:
    gradients = Nonfinite("gradients", limit=20)
    for step in range(1, 101):
        gradients.note(step, is_finite=bool(step % 2 == 1))
    gradients = Nonfinite("gradients", limit=20)
    with pytest.raises(RunFailed, match="the gradients of 20 of the last 2"):
        for step in range(1, 101):
            gradients.note(step, is_finite=step % 3 == 0)


def test_no_limit_ends_no_run() -> None:
    gradients = Nonfinite("gradients", limit=0)
    for step in range(1, 101):
        gradients.note(step, is_finite=False)


def test_a_last_loss_that_is_not_finite_is_a_failure() -> None:
    require_finite_loss("the loss", 8, is_finite=True)
    with pytest.raises(RunFailed, match="the evaluation loss of step 8, the last one, is not finite"):
        require_finite_loss("the evaluation loss", 8, is_finite=math.isfinite(math.nan))
