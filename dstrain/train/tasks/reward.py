"""Reward modelling: a model learns to give the chosen answer of a pair a higher score than the rejected one.

Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback" (arXiv 2203.02155),
equation 1, after Bradley and Terry 1952; names are those of trl 1.16 trainer/reward_trainer.py:
RewardTrainer.compute_loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from dstrain.job.schema import Job
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.data.tokenized import Form
from dstrain.train.tasks.log_probs import without_labels
from dstrain.train.tasks.pairs import PAIRS
from dstrain.train.tasks.samples import SampleCollator


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a model says of the sequences of a micro-batch, one number for each row."""

    scores: torch.Tensor
    """At their last tokens: (rows,), float32."""
    counts: torch.Tensor
    """Whether a row has an answer: (rows,); those that fill up a rank's share of an evaluation have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardObjective:
    """Reward modelling of a job; rows are all chosen sequences, then all rejected ones."""

    job: Job
    num_sequences: int = 2
    has_reference: bool = False
    form: Form = PAIRS
    collates: type[SampleCollator] = SampleCollator

    def outputs(self, model: Any, inputs: Mapping[str, Any]) -> Scores:
        """Returns the scores of both sequences of each pair."""
        scores = model(**without_labels(inputs)).logits.squeeze(-1).float()
        return Scores(scores=scores, counts=(inputs["labels"] != IGNORED).any(-1))

    def losses(self, outputs: Scores, reference: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the loss of each pair, and figures by the names that they have in DPO: (pairs,) each."""
        chosen, rejected = outputs.scores.chunk(2)
        loss = -logsigmoid(chosen - rejected)
        weight = self.job.reward.center_rewards_coefficient
        good, bad = chosen.detach(), rejected.detach()
        return {
            "loss": loss + weight * (chosen + rejected) ** 2 if weight else loss,
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/accuracies": (good > bad).to(good.dtype),
            "rewards/margins": good - bad,
        }

    def counts(self, outputs: Scores) -> torch.Tensor:
        """Returns whether each pair has an answer: (pairs,)."""
        return outputs.counts.chunk(2)[0]

    def among(self, outputs: Scores) -> Mapping[str, torch.Tensor]:
        """Returns nothing: each pair has every figure."""
        return {}
