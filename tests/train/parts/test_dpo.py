"""The losses of a pair by their published formulas, and log-probabilities by PyTorch's own softmax."""

from __future__ import annotations

import math

import pytest
import torch

from dstrain.choices import DpoLoss, LossKernel, Task
from dstrain.job.schema import Dpo, Job
from dstrain.train.parts.dpo import (
    Answers,
    DpoObjective,
    Figures,
    pair_losses,
    sequence_log_probs,
)

CHOSEN, REJECTED, BETA = 1.5, -0.5, 0.2
MARGIN = BETA * (CHOSEN - REJECTED)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "expected"),
    [
        (DpoLoss.SIGMOID, 0.0, -math.log(sigmoid(MARGIN))),
        (DpoLoss.HINGE, 0.0, 1 - MARGIN),
        (DpoLoss.IPO, 0.0, (CHOSEN / 3 - REJECTED / 2 - 1 / (2 * BETA)) ** 2),
        (DpoLoss.ROBUST, 0.0, -math.log(sigmoid(MARGIN))),
        (DpoLoss.ROBUST, 0.1, (-0.9 * math.log(sigmoid(MARGIN)) + 0.1 * math.log(sigmoid(-MARGIN))) / 0.8),
    ],
)
def test_the_loss_of_a_pair_is_that_of_its_paper(loss_type: DpoLoss, smoothing: float, expected: float) -> None:
    dpo = Dpo(beta=BETA, loss_type=loss_type, label_smoothing=smoothing)
    (loss,) = pair_losses(torch.tensor([CHOSEN, REJECTED]), torch.tensor([3, 2]), dpo).tolist()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_the_chosen_answer_s_own_loss_is_added_by_its_weight() -> None:
    reference = torch.tensor([-4.0, -3.0])
    answers = Answers(log_probs=torch.tensor([-3.0, -5.0], requires_grad=True), num_tokens=torch.tensor([6, 2]))

    def losses(weight: float) -> dict[str, float]:
        job = Job(model="m", output_dir="o", task=Task.DPO, dpo=Dpo(sft_weight=weight))
        return {name: value.item() for name, value in DpoObjective(job=job).losses(answers, reference).items()}

    alone, both = losses(0.0), losses(0.4)
    assert alone["nll_loss"] == both["nll_loss"] == pytest.approx(3 / 6)
    assert both["loss"] == pytest.approx(alone["loss"] + 0.4 * 3 / 6)


@pytest.mark.parametrize("kernel", [LossKernel.FULL, LossKernel.CHUNKED])
def test_log_probabilities_and_their_gradients_are_those_of_a_softmax(kernel: LossKernel) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, requires_grad=True)
    targets = torch.tensor([[1, 2, -100, -100, -100], [-100, 6, 0, 3, -100]])
    weights = torch.tensor([0.7, -0.3])
    sums = sequence_log_probs(logits, targets, kernel)
    (sums * weights).sum().backward()
    plain = logits.detach().clone().requires_grad_()
    each = plain.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = (each * (targets >= 0)).sum(-1)
    (expected * weights).sum().backward()
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert logits.grad is not None and plain.grad is not None
    assert torch.allclose(logits.grad, plain.grad, atol=1e-6)


def test_figures_leave_out_samples_that_do_not_count() -> None:
    figures = Figures()
    figures.add({"loss": torch.tensor([1.0, 3.0]), "other": torch.tensor([0.0, 9.0])}, torch.tensor([True, False]))
    figures.add({"loss": torch.tensor([2.0]), "other": torch.tensor([4.0])}, torch.tensor([True]))
    assert figures.drain(None) == ({"loss": 1.5, "other": 2.0}, 2)
    assert figures.drain(None) == ({}, 0)
