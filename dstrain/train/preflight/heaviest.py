"""Finds the heaviest micro-batch that a run trains on, from the lengths of its samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]

from dstrain.train.data.packing import PackedRows
from dstrain.train.preferences.pairs import PairData, column


def heaviest(data: Any, count: int, among: Sequence[int] | None = None) -> list[int]:
    """Returns the indices of the `count` heaviest rows, the heaviest first; fewer rows than that are repeated.

    The longest row decides the shape of a micro-batch, which is padded to it, and every epoch has it. Of rows of one
    length the one with the longest samples is heavier, by attention. `among`: indices of the rows to choose from; None:
    all of them.
    """
    tokens, squares = _sizes(data)
    rows = np.arange(len(tokens)) if among is None else np.unique(np.asarray(among))
    order = rows[np.lexsort((-rows, squares[rows], tokens[rows]))[::-1]]
    return [int(row) for row in np.resize(order[:count], count)]


def _sizes(data: Any) -> tuple[Any, Any]:
    """Returns the tokens of each row, and the sum of length² over its samples: (rows,) each."""
    if isinstance(data, PackedRows):
        lengths = column(data.samples, "length")
        return data.rows.sums(lengths), data.rows.sums(lengths**2)
    if isinstance(data, PairData):
        lengths = data.lengths()  # each sequence is a row of its own
        return lengths.max(axis=1), (lengths**2).sum(axis=1)
    lengths = column(data, "length")
    return lengths, lengths**2


def drawn(batches: Any, count: int) -> list[int]:
    """Returns the rows that the first `count` draws of the first epoch take; the order of training stays as it is.

    `batches`: a data loader of accelerate, whose sampler is seeded by the epoch.
    """
    level = batches
    while getattr(level, "batch_sampler", None) is not None:
        level = level.batch_sampler
    assert isinstance(level.sampler, SeedableRandomSampler)
    sampler = copy.copy(level.sampler)
    sampler.generator, sampler.epoch = None, 0
    return list(islice(sampler, count))
