"""Direct preference optimization: the chosen answer becomes more probable than the rejected one, against a reference.

Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7; names and defaults are
those of trl 1.16 trainer/dpo_trainer.py: DPOTrainer._compute_loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, logsigmoid

from dstrain.choices import DpoLoss, LossKernel
from dstrain.job.schema import Job
from dstrain.job.task_losses import Dpo
from dstrain.train import loss
from dstrain.train.data.slices import shift
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.preferences.pairs import REFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a model says of the answers of a micro-batch, one for each row."""

    log_probs: torch.Tensor
    """Sums of the log-probabilities of their tokens: (rows,), float32."""
    num_tokens: torch.Tensor
    """Their tokens: (rows,); 0 in rows that fill up a rank's share of an evaluation."""


def answers_of(model: Any, inputs: Mapping[str, Any], kernel: LossKernel) -> Answers:
    """Returns the log-probabilities of the answers of a micro-batch with `labels`, (rows, seq).

    The model gets no labels, so it computes no loss of its own, nor that of a router.
    """
    targets = shift(inputs["labels"])
    others = {name: value for name, value in inputs.items() if name not in ("labels", REFERENCE)}
    log_probs = sequence_log_probs(model(**others).logits, targets, kernel)
    return Answers(log_probs=log_probs, num_tokens=(targets != IGNORED).sum(-1))


def sequence_log_probs(logits: torch.Tensor, targets: torch.Tensor, kernel: LossKernel) -> torch.Tensor:
    """Returns the sum of the log-probabilities of the targets of each row: (rows,), float32.

    `logits`: (rows, seq, vocab); `targets`: (rows, seq), shifted. `full` converts all logits to float32, as the loss of
    Transformers does; `chunked` does not.
    """
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).to(logits.device)
    if kernel is LossKernel.CHUNKED:
        losses = loss.token_losses(flat, wanted, IGNORED)
    else:
        losses = cross_entropy(flat.float(), wanted, ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoObjective:
    """DPO of a job; rows are all chosen sequences, then all rejected ones."""

    job: Job

    def outputs(self, model: Any, inputs: Mapping[str, Any]) -> Answers:
        """Returns the log-probabilities of both answers of each pair."""
        return answers_of(model, inputs, self.job.loss)

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


class Figures:
    """Sums of the figures of pairs on the device; nothing waits for it until the means are asked for."""

    def __init__(self) -> None:
        """Starts without pairs."""
        self._names: tuple[str, ...] = ()
        self._sums: Any = None

    def add(self, figures: Mapping[str, torch.Tensor], counts: torch.Tensor) -> None:
        """Adds the figures of pairs, (pairs,) each, of those that count: (pairs,)."""
        values = torch.stack([figure.detach().double() for figure in figures.values()])
        sums = torch.cat([(values * counts.double()).sum(-1), counts.double().sum().unsqueeze(0)])
        self._names = tuple(figures)
        self._sums = sums if self._sums is None else self._sums + sums

    def drain(self, group: Any) -> tuple[dict[str, float], int]:
        """Returns the mean of each figure over the pairs of all ranks, and their number, and starts anew.

        `group` is a gloo group of all ranks; None for a single one.
        """
        if self._sums is None:
            return {}, 0
        sums, self._sums = self._sums.cpu(), None
        if group is not None:
            dist.all_reduce(sums, group=group)
        *totals, count = sums.tolist()
        means = {name: total / count for name, total in zip(self._names, totals, strict=True)} if count else {}
        return means, int(count)
