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


def without_targets(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of which no token counts."""
    return {**row, "labels": [IGNORED] * len(row["labels"])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of the rows, whole micro-batches and equally many on all ranks.

    ZeRO-3 runs each forward on all ranks, and sequence parallelism expects the size of a micro-batch. A shorter share
    is filled with rows without targets.
    """

    rows: Any
    """All rows: a sequence of samples."""
    index: int
    """Index of the share: the rank's, or that of its sequence-parallel group."""
    count: int
    """Number of shares."""
    micro_batch: int = 1
    """Rows of a micro-batch: the share is a multiple of it."""
    blank: Callable[[Mapping[str, Any]], Mapping[str, Any]] = without_targets
    """Returns a row without targets, made of another one."""

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / (self.count * self.micro_batch)) * self.micro_batch

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row of this rank; past the end of the data, the first row without targets."""
        if index >= len(self):
            raise IndexError(index)
        number = index * self.count + self.index
        if number < len(self.rows):
            row: Mapping[str, Any] = self.rows[number]
            return row
        return self.blank(self.rows[0])


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the losses and the number of targets of a micro-batch: (2,), float64.

    `logits`: (batch, seq, vocab); `targets`: (batch, seq). One row at a time, so that only one row's logits exist in
    float32.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for row, labels in zip(logits, targets, strict=True):
        losses = cross_entropy(row.float(), labels, ignore_index=IGNORED, reduction="none")
        totals[0] += losses.double().sum()
        totals[1] += (labels != IGNORED).sum()
    return totals


def mean_loss(
    totals_of: Callable[[Mapping[str, Any]], torch.Tensor], batches: Iterable[Mapping[str, Any]], group: Any
) -> tuple[float, int]:
    """Returns the mean loss per target over the micro-batches of all ranks, and the number of targets.

    `totals_of` returns the sum of the losses and the number of targets of a micro-batch: (2,), float64. `group` is a
    gloo group of all ranks; None for a single one. The loss is NaN without targets.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        counted = totals_of(batch)
        totals = totals.to(counted.device) + counted
    totals = totals.cpu()
    if group is not None:
        dist.all_reduce(totals, group=group)
    loss, targets = totals.tolist()
    return loss / targets if targets else math.nan, int(targets)
