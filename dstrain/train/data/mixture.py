"""Draws the samples of an epoch from data sets, and those held out for evaluation, given their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Numbers of samples, (samples,)."""


def numbers_of(is_chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Indices:
    """Returns the numbers of the samples that are marked, (samples,), in four bytes each where these are enough.

    >>> numbers_of(np.array([True, False, True])).tolist()
    [0, 2]
    """
    numbers: Indices = np.arange(len(is_chosen), dtype=np.int32 if len(is_chosen) < 2**31 else np.int64)
    return numbers if is_chosen.all() else numbers[is_chosen]


def drawn(size: int, count: int, *, seed: int, index: int) -> Indices:
    """Returns `count` of `size` sample numbers in ascending order, random but the same for the same seed.

    Each sample occurs `count // size` times, and a random part of them once more. `index` is that of the data set.

    >>> drawn(3, 7, seed=0, index=0).tolist() in ([0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2, 2])
    True
    """
    whole, rest = divmod(count, size)
    order = np.random.default_rng([seed, index]).permutation(size)[:rest]
    return np.sort(np.concatenate([np.tile(np.arange(size), whole), order]))


def split(indices: Indices, count: int, *, seed: int, index: int) -> tuple[Indices, Indices]:
    """Returns the samples to train on, and `count` held-out ones, each in their order."""
    chosen = drawn(len(indices), count, seed=seed, index=index)
    is_held_out = np.zeros(len(indices), dtype=bool)
    is_held_out[chosen] = True
    return indices[~is_held_out], indices[is_held_out]
