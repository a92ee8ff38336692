"""Rows of packed samples: which samples share a row, and a row's tokens, concatenated on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.facts.data.best_fit import packed_rows
from dstrain.facts.data.columns import MEDIA
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.token_cache import alone, made_beside

Row = dict[str, Any]
"""`input_ids`, `labels` and `position_ids` of a packed row, each (tokens,), and the files of its media."""
_FILES = ("members.npy", "starts.npy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Which samples share a row."""

    members: Any
    """Indices of samples, row after row: (samples,) int32 or int64."""
    starts: Any
    """Index in `members` at which each row begins, and their number: (rows + 1,) int64."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Packing:
        """Returns the packing with these indices of samples in each row."""
        widths = np.array([len(row) for row in rows], np.int64)
        return cls(members=np.concatenate(rows), starts=np.concatenate([[0], np.cumsum(widths)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Any:
        """Returns the indices of the samples of a row. Raises IndexError beyond the last."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.members[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def sums(self, values: Any) -> Any:
        """Returns the sum of the values of each row's samples, (rows,), given one for each sample."""
        return np.add.reduceat(values[self.members], self.starts[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of whole samples, concatenated on access; a sequence like a data set."""

    samples: Any
    """A data set with `input_ids`, `labels` and perhaps columns of media in Arrow's format, for NumPy arrays
    without copies."""
    rows: Packing

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Returns the tokens of a row, and the files of its images and videos in the order of their tokens."""
        members = self.samples[self.rows[index].tolist()]
        input_ids, labels = (members.column(name).combine_chunks() for name in ("input_ids", "labels"))
        lengths = input_ids.value_lengths().to_numpy(zero_copy_only=False)
        row = row_of(input_ids.flatten().to_numpy(), labels.flatten().to_numpy(), lengths)
        for name in {*MEDIA}.intersection(members.column_names):
            row[name] = members.column(name).combine_chunks().flatten().to_pylist()
        return row


def row_of(input_ids: Any, labels: Any, lengths: Any) -> Row:
    """Returns concatenated samples; positions restart at 0 in each sample, whose first token is no target."""
    starts = np.cumsum(lengths) - lengths
    targets = labels.copy()
    targets[starts] = IGNORED
    positions = np.arange(len(targets)) - np.repeat(starts, lengths)
    return {"input_ids": input_ids, "labels": targets, "position_ids": positions}


def packed(lengths: Any, capacity: int, *, seed: int | Sequence[int]) -> Packing:
    """Returns rows of at most `capacity` tokens of samples of these lengths, (samples,).

    Samples of equal length, the rows and the samples within a row are in random order, the same for the same seed.

    >>> sorted(sorted(row.tolist()) for row in packed(np.array([6, 5, 4, 3, 2]), 10, seed=0))
    [[0, 2], [1, 3, 4]]
    """
    members, starts = packed_rows(lengths, capacity, seed=seed)
    return Packing(members=members, starts=starts)


def kept(folder: Path, lengths: Any, capacity: int, *, seed: int) -> Packing:
    """Returns rows mapped into memory from a folder, after making them there if no other rank did."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in _FILES]
    if not all(path.exists() for path in paths):
        with alone(folder):
            if not all(path.exists() for path in paths):
                made = packed(lengths, capacity, seed=seed)
                for path, values in zip(paths, (made.members, made.starts), strict=True):
                    with made_beside(path) as beside:
                        np.save(beside, values)
    members, starts = (np.load(path, mmap_mode="r") for path in paths)
    return Packing(members=members, starts=starts)
