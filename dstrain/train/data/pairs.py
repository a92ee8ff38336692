"""Pairs in tokens: the same prompt with a chosen and with a rejected answer, and micro-batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import torch

from dstrain.choices import LossOn
from dstrain.errors import InvalidConfig
from dstrain.facts.data.columns import MEDIA
from dstrain.facts.data.datafile import Refuse
from dstrain.facts.data.formats import Pair
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.sources import Rows
from dstrain.train.data.tokenize import NUMBERS, Encoded, Encoder, Form, TokenRow, counts_of, with_files

REFERENCE = "reference"
"""Key of the reference log-probabilities in a pair and in a micro-batch."""
_BATCH_PAIRS = 128
_OF_EQUAL = {"equal_pairs": 1}
_COLUMNS = {"input_ids": datasets.List(NUMBERS), "starts": NUMBERS, "ends": NUMBERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTokens:
    """A pair and the tokens of its sides."""

    pair: Pair
    sides: tuple[Encoded, Encoded]

    @property
    def teaches(self) -> bool:
        """Whether there is something to learn: its answers differ, and each has a token left."""
        return not self.pair.is_equal and all(side.teaches for side in self.sides)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the pair, as `tokenize.COUNTED` names them."""
        if self.pair.is_equal:
            return dict(_OF_EQUAL)
        cut = sum(side.counts.cut_answers for side in self.sides)
        of_sides = {"empty_answers": 0, "empty_sides": self.pair.num_empty, "cut_answers": cut}
        return {**counts_of(self.sides[0].counts), **of_sides}


def _pairs(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    """Yields every pair, each side cut at its end to the length of the encoder, so that prompts stay equal.

    A pair has no tokens if its answers are equal, or if one has no token left.
    """
    for batch in _batches(rows, refuse):
        for tokens in _encoded(encoder, [one for one in batch if not one[1].is_equal], refuse):
            yield with_files(_row(tokens), tokens.sides[0], encoder)
        for where, pair in batch:
            if pair.is_equal:
                nothing = TokenRow(columns={name: [] for name in _COLUMNS}, counts=_OF_EQUAL, where=where)
                yield with_files(nothing, None, encoder)


def encoded_pairs(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[PairTokens]:
    """Yields the tokens of every pair in order, those with equal answers among them."""
    for batch in _batches(rows, refuse):
        yield from _encoded(encoder, batch, refuse)


def _batches(rows: Rows, refuse: Refuse) -> Iterator[list[tuple[str, Pair]]]:
    """Yields the pairs in batches, on each of which the tokenizer works in parallel."""
    pairs = rows.parsed(refuse)
    while batch := list(islice(pairs, _BATCH_PAIRS)):
        yield batch


def _encoded(encoder: Encoder, pairs: Sequence[tuple[str, Pair]], refuse: Refuse) -> Iterator[PairTokens]:
    """Yields the tokens of each pair; one of which a side is refused is refused once."""
    errors: list[InvalidConfig] = []
    found = list(encoder.encode([(where, side) for where, pair in pairs for side in pair.sides], errors.append))
    if errors and len(pairs) > 1:
        for one in pairs:
            yield from _encoded(encoder, [one], refuse)
    elif errors:
        refuse(errors[0])
    else:
        for (_, pair), chosen, rejected in zip(pairs, found[::2], found[1::2], strict=True):
            yield PairTokens(pair=pair, sides=(chosen, rejected))


def _row(tokens: PairTokens) -> TokenRow:
    sides = tokens.sides if tokens.teaches else ()
    places = [_place_of(side) for side in sides]
    return TokenRow(
        columns={
            "input_ids": [side.input_ids for side in sides],
            "starts": [start for start, _ in places],
            "ends": [end for _, end in places],
        },
        length=sum(len(side.input_ids) for side in sides),
        num_learned=sum(side.num_learned for side in sides),
        num_cut=sum(side.num_cut for side in tokens.sides),
        counts=tokens.counts,
        where=tokens.sides[0].where,
    )


def _place_of(side: Encoded) -> tuple[int, int]:
    """Returns where the last answer, whose tokens alone have labels, starts and ends."""
    learned = [index for index, label in enumerate(side.labels) if label != IGNORED]
    return learned[0], learned[-1] + 1


class PairData:
    """A data set of pairs, with the reference log-probabilities of their answers once these are known."""

    def __init__(self, dataset: Any) -> None:
        """`dataset` has a row for each pair: `input_ids` of each side, and `starts` and `ends` of the answers."""
        self.dataset = dataset
        self.reference: Any = None
        """Log-probabilities of the answers under the reference model: (pairs, 2), float32."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the `sequences` of a pair, the chosen one first, and their `reference`.

        Each has `input_ids`, `labels`, and the files of the prompt's images and videos.
        """
        names = [name for name in MEDIA if name in self.dataset.column_names]
        files = {name: self.dataset[int(index)][name] for name in names}
        sequences = [sequence | files for sequence in self.sequences(int(index))]
        known = np.zeros(2) if self.reference is None else self.reference[index]
        return {"sequences": sequences, REFERENCE: known}

    def lengths(self) -> Any:
        """Returns the tokens of each side up to the end of its answer, with which it ends: (pairs, 2)."""
        return column(self.dataset, "ends")

    def sequences(self, index: int) -> list[dict[str, Any]]:
        """Returns both sides of a pair, without files."""
        row = self.dataset[index]
        return [
            {"input_ids": ids, "labels": [IGNORED] * start + list(ids[start:end]) + [IGNORED] * (len(ids) - end)}
            for ids, start, end in zip(row["input_ids"], row["starts"], row["ends"], strict=True)
        ]


def column(dataset: Any, name: str) -> Any:
    """Returns the numbers of a column of a `datasets.Dataset`, int64; lists of one length become rows."""
    values: Any = np.asarray(dataset.with_format("numpy")[name][:])
    return (np.stack(list(values)) if values.dtype == object else values).astype(np.int64)


def without_targets(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pair that counts nowhere, made of another one."""
    nothing = [{**sequence, "labels": [IGNORED] * len(sequence["input_ids"])} for sequence in row["sequences"]]
    return {**row, "sequences": nothing}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCollator:
    """Collates pairs into one micro-batch: the chosen sequences of all pairs, then the rejected ones.

    Each sequence brings the images and videos of its prompt, so the tower sees them as often as the model.
    """

    collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors of the collator with 2 × pairs rows, and `reference`, (rows,), float64."""
        by_side = list(zip(*(pair["sequences"] for pair in pairs), strict=True))
        batch = self.collator([sequence for sequences in by_side for sequence in sequences])
        known = np.stack([pair[REFERENCE] for pair in pairs]).T.reshape(-1)
        return {**batch, REFERENCE: torch.from_numpy(known.astype(np.float64))}


PAIRS = Form(columns=_COLUMNS, encoded=_pairs, whole=PairData, loss_on=LossOn.LAST)
"""Each sample is a pair of sequences, of which the last answers count."""
