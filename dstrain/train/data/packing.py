"""Rows of packed samples, concatenated on access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dstrain.train.data.tokenize import IGNORED

Row = dict[str, np.ndarray[Any, Any]]
"""`input_ids`, `labels` and `position_ids` of a packed row, each (tokens,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of whole samples, concatenated on access; a sequence like a data set."""

    samples: Any
    """A data set with `input_ids` and `labels` in Arrow's format, for NumPy arrays without copies."""
    rows: Sequence[Sequence[int]]
    """Indices of the samples in each row."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Returns the tokens of a row."""
        members = self.samples[list(self.rows[index])]
        input_ids, labels = (members.column(name).combine_chunks() for name in ("input_ids", "labels"))
        lengths = input_ids.value_lengths().to_numpy(zero_copy_only=False)
        return row_of(input_ids.flatten().to_numpy(), labels.flatten().to_numpy(), lengths)


def row_of(input_ids: Any, labels: Any, lengths: Any) -> Row:
    """Returns concatenated samples; positions restart at 0 in each sample, whose first token is no target."""
    starts = np.cumsum(lengths) - lengths
    targets = labels.copy()
    targets[starts] = IGNORED
    positions = np.arange(len(targets)) - np.repeat(starts, lengths)
    return {"input_ids": input_ids, "labels": targets, "position_ids": positions}
