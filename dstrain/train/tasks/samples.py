"""Samples of several sequences that each end with an answer: a pair has two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dstrain.train.data.token_files import MEDIA
from dstrain.train.data.tokenize import IGNORED

REFERENCE = "reference"
"""Key of the reference log-probabilities in a sample and in a micro-batch."""


class Samples:
    """A data set of samples, with the reference log-probabilities of their answers once these are known."""

    def __init__(self, dataset: Any) -> None:
        """`dataset` has a row for each sample: `input_ids` of each sequence, and `starts` and `ends` of the answers."""
        self.dataset = dataset
        self.reference: Any = None
        """Log-probabilities of the answers under the reference model: (samples, sequences), float32."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the `sequences` of a sample, each with `input_ids` and `labels` and the files of the prompt's images,
        videos and audios, and their `reference`."""
        names = [name for name in MEDIA if name in self.dataset.column_names]
        files = {name: self.dataset[int(index)][name] for name in names}
        sequences = [sequence | files for sequence in self._sequences(int(index))]
        known = np.zeros(len(sequences)) if self.reference is None else self.reference[index]
        return {"sequences": sequences, REFERENCE: known}

    def lengths(self) -> Any:
        """Returns the tokens of each sequence up to the end of its answer, with which it ends: (samples, sequences)."""
        return column(self.dataset, "ends")

    def shown(self, index: int) -> list[dict[str, Any]]:
        """Returns the sequences of a sample that the log shows."""
        return self._sequences(index)

    def _sequences(self, index: int) -> list[dict[str, Any]]:
        row = self.dataset[index]
        return [
            sequence_of(ids, start, end)
            for ids, start, end in zip(row["input_ids"], row["starts"], row["ends"], strict=True)
        ]


def column(dataset: Any, name: str) -> Any:
    """Returns the numbers of a column of a `datasets.Dataset`, int64; lists of one length become rows."""
    values: Any = np.asarray(dataset.with_format("numpy")[name][:])
    return (np.stack(list(values)) if values.dtype == object else values).astype(np.int64)


def sequence_of(ids: Sequence[int], start: int, end: int) -> dict[str, Any]:
    """Returns a sequence whose labels are the tokens of its answer, from `start` to before `end`.

    >>> sequence_of([5, 6, 7, 8], 2, 4)["labels"]
    [-100, -100, 7, 8]
    """
    return {"input_ids": ids, "labels": [IGNORED] * start + list(ids[start:end]) + [IGNORED] * (len(ids) - end)}


def without_targets(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sample that counts nowhere, made of another one."""
    nothing = [{**sequence, "labels": [IGNORED] * len(sequence["input_ids"])} for sequence in row["sequences"]]
    return {**row, "sequences": nothing}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCollator:
    """Collates samples into one micro-batch: the first sequences of all samples, then the second ones.

    Each sequence brings the images and videos of its prompt, so the tower sees them as often as the model.
    """

    collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors of the collator with sequences × samples rows, and `reference`, (rows,), float64."""
        by_place = list(zip(*(sample["sequences"] for sample in samples), strict=True))
        batch = self.collator([sequence for sequences in by_place for sequence in sequences])
        return {**batch, REFERENCE: self.reference_of(samples)}

    def reference_of(self, samples: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Returns the reference of each row: (sequences × samples,), float64."""
        known = np.stack([sample[REFERENCE] for sample in samples]).T.reshape(-1)
        return torch.from_numpy(known.astype(np.float64))
