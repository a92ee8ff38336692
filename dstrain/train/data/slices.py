"""Slices of a micro-batch along the sequence, one for each rank of a sequence-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.train.data.tokenize import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The part of every row that a rank trains on."""

    index: int
    """Rank in its sequence-parallel group, from 0."""
    count: int
    """Ranks of the group."""

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's slice of a micro-batch: (batch, seq) becomes (batch, seq / count).

        The labels are shifted first, since the next token of a slice's last one is on another rank; Transformers takes
        them as `shift_labels`. Borders of packed samples stay those of whole rows, which attention sees again.
        """
        shifted = shift(batch["labels"])
        whole = {**batch, "labels": shifted, "shift_labels": shifted}
        whole.pop("attention_mask", None)  # Ulysses drops masks; attention is causal, and padding is at the end
        width = shifted.shape[1] // self.count
        part = slice(self.index * width, (self.index + 1) * width)
        return {
            name: value[:, part].contiguous() if isinstance(value, torch.Tensor) and value.dim() == 2 else value
            for name, value in whole.items()
        }


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Returns the target of each token: label i + 1 for token i, and none for the last. Both: (batch, seq)."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
