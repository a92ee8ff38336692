"""The evaluation loss: a mean over tokens, independent of the number of ranks, micro-batch and packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from dstrain.train.data.tokenize import IGNORED
from dstrain.train.rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of the rows, equally many on all ranks, since ZeRO-3 runs each forward on all ranks.

    A shorter share is filled with rows without targets.
    """

    rows: Any
    """All rows: a sequence of samples with `labels`."""
    rank: Rank

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.rank.world_size)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row of this rank; past the end of the data, the first row without targets."""
        if index >= len(self):
            raise IndexError(index)
        number = index * self.rank.world_size + self.rank.index
        if number < len(self.rows):
            row: Mapping[str, Any] = self.rows[number]
            return row
        filling = self.rows[0]
        return {**filling, "labels": [IGNORED] * len(filling["labels"])}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the losses and the number of targets of a micro-batch: (2,), float64.

    `logits`: (batch, seq, vocab); `labels`: (batch, seq); token i predicts label i + 1. One row at a time, so that only
    one row's logits exist in float32.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for row, targets in zip(logits, labels, strict=True):
        losses = cross_entropy(row[:-1].float(), targets[1:], ignore_index=IGNORED, reduction="none")
        totals[0] += losses.double().sum()
        totals[1] += (targets[1:] != IGNORED).sum()
    return totals


def mean_loss(
    logits_of: Callable[[Mapping[str, Any]], torch.Tensor], batches: Iterable[dict[str, Any]], group: Any
) -> tuple[float, int]:
    """Returns the mean loss per target over the micro-batches of all ranks, and the number of targets.

    `group` is a gloo group of all ranks; None for a single one. The loss is NaN without targets.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        labels = batch.pop("labels")
        logits = logits_of(batch)
        totals = totals.to(logits.device) + loss_of(logits, labels.to(logits.device))
    totals = totals.cpu()
    if group is not None:
        dist.all_reduce(totals, group=group)
    loss, targets = totals.tolist()
    return loss / targets if targets else math.nan, int(targets)
