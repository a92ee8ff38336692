"""Direct preference optimization: the chosen answer becomes more probable than the rejected one, against a reference.

Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7; names and defaults are
those of trl 1.16 trainer/dpo_trainer.py: DPOTrainer._compute_loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from dstrain.choices import DpoLoss
from dstrain.job.schema import Job
from dstrain.job.task_losses import Dpo
from dstrain.train.data.tokenized import Form
from dstrain.train.tasks.log_probs import Answers, answers_of
from dstrain.train.tasks.pairs import PAIRS
from dstrain.train.tasks.samples import SampleCollator


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoObjective:
    """DPO of a job; rows are all chosen sequences, then all rejected ones."""

    job: Job
    num_sequences: int = 2
    has_reference: bool = True
    form: Form = PAIRS
    collates: type[SampleCollator] = SampleCollator

    def outputs(self, model: Any, inputs: Mapping[str, Any]) -> Answers:
        """Returns the log-probabilities of both answers of each pair."""
        return answers_of(model, inputs, self.job.loss)

    def log_probs(self, outputs: Answers) -> torch.Tensor:
        """Returns the log-probabilities of all answers: (rows,)."""
        return outputs.log_probs

    def losses(self, outputs: Answers, reference: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the loss of each pair, and TRL's figures of it: (pairs,) each."""
        ratios = outputs.log_probs - reference.to(outputs.log_probs.dtype)
        loss = pair_losses(ratios, outputs.num_tokens, self.job.dpo)
        nll = chosen_nll(outputs.log_probs, outputs.num_tokens)
        chosen, rejected = (self.job.dpo.beta * part for part in ratios.detach().chunk(2))
        log_probs = outputs.log_probs.detach().chunk(2)
        return {
            "loss": loss + self.job.dpo.sft_weight * nll if self.job.dpo.sft_weight else loss,
            "nll_loss": nll.detach(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "rewards/margins": chosen - rejected,
            "logps/chosen": log_probs[0],
            "logps/rejected": log_probs[1],
        }

    def counts(self, outputs: Answers) -> torch.Tensor:
        """Returns whether each pair has an answer: (pairs,)."""
        return outputs.num_tokens.chunk(2)[0] > 0

    def among(self, outputs: Answers) -> Mapping[str, torch.Tensor]:
        """Returns nothing: each pair has every figure."""
        return {}


def chosen_nll(log_probs: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Returns the negative log-likelihood of each chosen answer, per token: (pairs,); both arguments are (rows,).

    Source: Pang et al. 2024, "Iterative Reasoning Preference Optimization" (arXiv 2404.19733), equation 1.
    """
    return -(log_probs / num_tokens.clamp(min=1)).chunk(2)[0]


def pair_losses(ratios: torch.Tensor, num_tokens: torch.Tensor, dpo: Dpo) -> torch.Tensor:
    """Returns the loss of each pair: (pairs,).

    `ratios`: log-probabilities of answers over those of the reference, (rows,), the chosen ones first; `num_tokens`:
    their tokens, (rows,), by which `ipo` divides them.
    """
    if dpo.loss_type is DpoLoss.IPO:
        chosen, rejected = (ratios / num_tokens.clamp(min=1)).chunk(2)
        return (chosen - rejected - 1 / (2 * dpo.beta)) ** 2
    chosen, rejected = ratios.chunk(2)
    margin = dpo.beta * (chosen - rejected)
    if dpo.loss_type is DpoLoss.HINGE:
        return torch.relu(1 - margin)
    if dpo.loss_type is DpoLoss.SIGMOID:
        return -logsigmoid(margin)
    wrong = dpo.label_smoothing
    return (wrong * logsigmoid(-margin) - (1 - wrong) * logsigmoid(margin)) / (1 - 2 * wrong)
