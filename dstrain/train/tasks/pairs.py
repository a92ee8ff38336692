"""Pairs in tokens: the same prompt with a chosen and with a rejected answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import datasets  # type: ignore[import-untyped]

from dstrain.choices import LossOn
from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import Refuse
from dstrain.facts.data.preferences import Pair
from dstrain.train.data.sources import Rows
from dstrain.train.data.token_files import NUMBERS, TokenRow
from dstrain.train.data.tokenize import IGNORED, Encoded, Encoder
from dstrain.train.data.tokenized import Form, counts_of, with_files
from dstrain.train.tasks.samples import Samples

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
        """What is counted of the pair, as `counts.COUNTED` names it."""
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
    pairs = rows.pairs(refuse)
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
    places = [place_of(side) for side in sides]
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


def place_of(side: Encoded) -> tuple[int, int]:
    """Returns where the last answer, whose tokens alone have labels, starts and ends."""
    learned = [index for index, label in enumerate(side.labels) if label != IGNORED]
    return learned[0], learned[-1] + 1


PAIRS = Form(columns=_COLUMNS, encoded=_pairs, whole=Samples, loss_on=LossOn.LAST)
"""Each sample is a pair of sequences, of which the last answers count."""
