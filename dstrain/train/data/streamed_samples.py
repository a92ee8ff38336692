"""Reads data sets without an end: part by part, in an order that each pass draws anew, by several readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import Refuse
from dstrain.facts.data.parts import streamed_parts
from dstrain.facts.data.rows import Part
from dstrain.facts.data.turns import Conversation
from dstrain.job.data_source import DataSource, weights_of
from dstrain.job.schema import Job
from dstrain.train.data.sources import Rows, rows_of

Text = tuple[str, Conversation | str]
"""The place of a sample, such as a file and a byte, and the sample."""

_LEAST_BYTES, _MOST_BYTES = 2**10, 2**20
_PARTS, _MOST_PARTS = 1024, 100_000
"""Parts of all data: as many as shuffle well in small data, and as few as memory holds in large ones."""


class RowPlace(NamedTuple):
    """Where a reader is in a data set."""

    number: int
    """Number of the part, counted over all passes."""
    taken: int = 0
    """Its samples that were taken."""


Feed = Iterator[tuple[RowPlace, Text | None]]
Taken = tuple[list[Text], Sequence[RowPlace | None]]
"""Samples of a block, and where each data set is after them; None: as before."""


class Chunk(NamedTuple):
    """A part of a file, or a shard on a hub."""

    rows: int
    """Index of the data set."""
    origin: int
    """Index of its file."""
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class EndlessRows:
    """Data sets whose parts are read in one random order, pass after pass."""

    sets: tuple[Rows, ...]
    """Their formats have been detected."""
    chunks: tuple[Chunk, ...]
    """The parts of a pass."""
    weight: float = 1.0
    """Share of the samples, relative to other rows of this kind."""
    seed: tuple[int, ...]

    def samples(self, place: RowPlace, *, stride: int, refuse: Refuse) -> Feed:
        """Yields every sample from a place on, with the place after it, and None after each part.

        The next part is `stride` parts later. Errors of unusable rows go to `refuse`. Raises InvalidConfig if two
        passes have no sample.
        """
        number, skipped, num_barren = place.number, place.taken, 0
        while num_barren <= 2 * len(self.chunks):
            num_barren += 1
            for taken, text in self._rest(self.chunk(number), skipped, refuse):
                num_barren = 0
                yield RowPlace(number, taken), text
            number, skipped = number + stride, 0
            yield RowPlace(number), None
        raise InvalidConfig(f"{self.sets[0].name}: no usable rows")

    def _rest(self, chunk: Chunk, skipped: int, refuse: Refuse) -> Iterator[tuple[int, Text]]:
        """Yields the samples of a part after the first ones, with their numbers from 1."""
        taken = 0

        def told(error: InvalidConfig) -> None:
            if taken >= skipped:  # the others were told when the samples after them were taken
                refuse(error)

        for text in self.read(chunk, told):
            taken += 1
            if taken > skipped:
                yield taken, text

    def chunk(self, number: int) -> Chunk:
        """Returns a part of the endless order."""
        of_pass, index = divmod(number, len(self.chunks))
        order = np.random.default_rng([*self.seed, of_pass]).permutation(len(self.chunks))
        return self.chunks[int(order[index])]

    def read(self, chunk: Chunk, refuse: Refuse) -> Iterator[Text]:
        """Yields the samples of a part."""
        return self.sets[chunk.rows].of(chunk.origin, chunk.part, None).conversations(refuse)


def endless_rows(job: Job) -> list[EndlessRows]:
    """Returns the training data of a job: with weights one for each data set, else one for all of them.

    Raises InvalidConfig if a data set cannot be streamed.
    """
    sources = job.train_sources
    sets = [rows_of(source, job, training=True).detected() for source in sources]
    total = sum(origin.path.stat().st_size for rows in sets for origin in rows.origins if origin.path)
    size = max(min(_MOST_BYTES, max(_LEAST_BYTES, total // _PARTS)), total // _MOST_PARTS)
    chunks = [
        Chunk(index, number, part)
        for index, rows in enumerate(sets)
        for number, origin in enumerate(rows.origins)
        for part in (streamed_parts(origin.path, size) if origin.path else origin.parts())
    ]
    weights = weights_of(sources)
    if weights is None:
        _require_one_kind(sources, sets)
        return [EndlessRows(sets=tuple(sets), chunks=tuple(chunks), seed=(job.seed, 0))]
    return [
        EndlessRows(
            sets=tuple(sets),
            chunks=tuple(chunk for chunk in chunks if chunk.rows == index),
            weight=weight,
            seed=(job.seed, index),
        )
        for index, weight in enumerate(weights)
    ]


def _require_one_kind(sources: Sequence[DataSource], sets: Sequence[Rows]) -> None:
    """Raises InvalidConfig for a hub's data set beside others without weights: its shards say nothing of its size."""
    for source, rows in zip(sources, sets, strict=True):
        if len(sets) > 1 and any(origin.path is None for origin in rows.origins):
            problem = f"{source.path} is streamed from a hub beside other data sets, and has no weight"
            raise InvalidConfig(problem, hint="Give all data sets a weight.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Samples that are shuffled together."""

    number: int
    places: tuple[RowPlace, ...]
    """Where the reader was before them, in each of the data sets."""
    reached: int
    """The last part that was begun for them."""
    texts: list[Text]
    """In random order, the same for the same seed, reader and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One of the processes that read the training data: a rank, or a worker of its data loader."""

    data: Sequence[EndlessRows]
    index: int
    """From 0, over all ranks."""
    count: int
    """All readers; part n of the endless order belongs to reader n % count."""
    block_samples: int
    """Samples of a block at most."""
    seed: int

    def blocks(self, number: int, places: Sequence[RowPlace], refuse: Refuse) -> Iterator[Block]:
        """Yields the blocks from one on, which begins at these places; errors of unusable rows go to `refuse`."""
        feeds = [rows.samples(at, stride=self.count, refuse=refuse) for rows, at in zip(self.data, places, strict=True)]
        taken = self._of_passes(feeds[0]) if len(feeds) == 1 else self._by_weights(feeds, number)
        before = tuple(places)
        for block, (texts, after) in enumerate(taken, start=number):
            order = np.random.default_rng([self.seed, self.index, block]).permutation(len(texts))
            then = tuple(at or was for at, was in zip(after, before, strict=True))
            reached = max(at.number if at.taken else at.number - self.count for at in then)
            yield Block(number=block, places=before, reached=reached, texts=[texts[index] for index in order])
            before = then

    def _of_passes(self, feed: Feed) -> Iterator[Taken]:
        """Yields the samples of each block, none of which belongs to two passes."""
        size, texts = len(self.data[0].chunks), list[Text]()
        for at, text in feed:
            if text is not None:
                texts.append(text)
            is_end = text is None and at.number // size > (at.number - self.count) // size
            if len(texts) == self.block_samples or (is_end and texts):
                yield texts, [at]
                texts = []

    def _by_weights(self, feeds: Sequence[Feed], number: int) -> Iterator[Taken]:
        """Yields the samples of each block, in the proportion of the weights over all blocks."""
        total = sum(rows.weight for rows in self.data)
        for block in count(number):
            texts: list[Text] = []
            after: list[RowPlace | None] = [None] * len(feeds)
            for index, (feed, rows) in enumerate(zip(feeds, self.data, strict=True)):
                begin, end = (int(self.block_samples * at * rows.weight / total) for at in (block, block + 1))
                for at, text in islice(((at, text) for at, text in feed if text is not None), end - begin):
                    texts.append(text)
                    after[index] = at
            yield texts, after
