"""What looks wrong in a logged step."""

from __future__ import annotations

from dstrain.monitor.health.nonfinite import check


def test_a_loss_that_is_not_a_number_is_found() -> None:
    (found,) = check(3, {"loss": float("nan"), "grad_norm": 1.0})
    assert (found.rule, found.step, found.value) == ("nonfinite_loss", 3, "nan")
    assert "learning_rate" in found.message


def test_an_infinite_gradient_norm_is_found() -> None:
    assert [found.rule for found in check(1, {"loss": 1.0, "grad_norm": float("inf")})] == ["nonfinite_grad_norm"]


def test_a_healthy_step_has_no_findings() -> None:
    assert check(1, {"loss": 1.0, "grad_norm": 0.5, "learning_rate": 0.0}) == []
