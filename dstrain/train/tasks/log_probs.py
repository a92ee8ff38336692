"""Log-probabilities of answers, made of the logits of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dstrain.choices import LossKernel
from dstrain.train import loss
from dstrain.train.data.slices import shift
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.tasks.samples import REFERENCE


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
    log_probs = sequence_log_probs(model(**without_labels(inputs)).logits, targets, kernel)
    return Answers(log_probs=log_probs, num_tokens=(targets != IGNORED).sum(-1))


def without_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the model gets of a micro-batch."""
    return {name: value for name, value in inputs.items() if name not in ("labels", REFERENCE)}


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
