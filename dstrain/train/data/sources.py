"""Reads the data sets of a job as samples: files, globs and data sets on a hub, once or without an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets  # type: ignore[import-untyped]
import numpy as np

from dstrain.choices import Hub
from dstrain.errors import EnvironmentProblem, InvalidConfig, first_line
from dstrain.facts.data.columns import without_missing
from dstrain.facts.data.datafile import Refuse, files_of, is_file_name, parsed, reading_for, reading_of, samples
from dstrain.facts.data.formats import Reading, unused
from dstrain.facts.data.rows import Part, Sample, parts_of, row_parts, streamed_parts
from dstrain.facts.data.turns import Conversation
from dstrain.job.data_source import DataSource, weights_of
from dstrain.job.schema import Job

_BATCH_ROWS = 64
"""Rows of a data set of a hub that are in memory at a time; each may have images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A file, or a data set of a hub, whose parts are read on their own."""

    name: str
    identity: str
    """Changes with the rows."""
    parts: Callable[[], list[Part]]
    """Returns its parts in order."""
    samples: Callable[[Refuse, Part | None], Iterator[Sample]]
    """Yields the rows of a part, or all rows, in order; errors of unreadable ones go to its first argument."""
    path: Path | None = None
    """The file; None on a hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one data set, or of a part of it."""

    name: str
    """File, glob or data set id, for messages."""
    origins: tuple[Origin, ...]
    """The files that a glob names, or the only one."""
    reading: Reading
    """As the job says."""
    max_samples: int | None
    part: Part | None = None
    """The part of the only origin whose rows these are; None: all rows. Its `reading` has been detected."""
    unused: Counter[str] = field(default_factory=Counter)
    """Unused column → number of rows with it, of those read so far."""
    tally: Counter[str] = field(default_factory=Counter)
    """`read` and `usable` → number of rows that are JSON or Parquet, and of those that are samples, read so far."""

    @property
    def identity(self) -> str:
        """Changes with the rows."""
        return "\n".join(origin.identity for origin in self.origins)

    def detected(self) -> Rows:
        """Returns these rows with the format of the first readable one.

        Raises InvalidConfig if no row is readable, or if its columns have no format.
        """
        first = next(self._read(lambda error: None), None)
        if first is None:
            raise InvalidConfig(f"{self.name}: no samples")
        return replace(self, reading=reading_of(self.name, list(first.row), self.reading))

    def of(self, origin: int, part: Part, limit: int | None) -> Rows:
        """Returns the rows of a part, at most `limit` samples of them; the format has been detected."""
        origins = (self.origins[origin],)
        return replace(self, origins=origins, part=part, max_samples=limit, unused=Counter(), tally=Counter())

    def parsed(self, refuse: Refuse) -> Iterator[tuple[str, Any]]:
        """Yields the place of each row, and its conversation, text or pair; errors of unusable rows go to `refuse`."""
        return islice(self._all_parsed(refuse), self.max_samples)

    def _read(self, refuse: Refuse) -> Iterator[Sample]:
        for origin in self.origins:
            yield from origin.samples(refuse, self.part)

    def _all_parsed(self, refuse: Refuse) -> Iterator[tuple[str, Any]]:
        reading = None if self.part is None else self.reading
        for sample in self._read(refuse):
            self.tally["read"] += 1
            reading = reading or reading_of(self.name, list(sample.row), self.reading)
            try:
                found = parsed(sample, reading)
            except InvalidConfig as error:
                refuse(error)
                continue
            self.unused.update(unused(sample.row, reading))
            self.tally["usable"] += 1
            yield sample.where, found


def rows_of(source: DataSource, job: Job, *, training: bool) -> Rows:
    """Returns the rows of a data set. Raises InvalidConfig or EnvironmentProblem if it cannot be found."""
    reading = reading_for(source, job)
    if not is_file_name(source.path):
        origins: list[Origin] = [_hub_origin(source, job, training=training)]
    elif source.split is not None or source.subset is not None:
        raise InvalidConfig(
            f"{source.path} is a file, which has no split or subset", hint="Use max_samples for its first samples."
        )
    else:
        origins = [_file_origin(path) for path in files_of(source.path)]
    return Rows(
        name=origins[0].name if len(origins) == 1 else source.path,
        origins=tuple(origins),
        reading=reading,
        max_samples=source.max_samples,
    )


def _file_origin(path: Path) -> Origin:
    stamp = path.stat() if path.exists() else None
    return Origin(
        name=str(path),
        identity=f"{path.resolve()} {stamp.st_size} {stamp.st_mtime_ns}" if stamp else str(path.resolve()),
        parts=partial(parts_of, path),
        samples=partial(samples, path),
        path=path,
    )


def _hub_origin(source: DataSource, job: Job, *, training: bool) -> Origin:
    if job.streaming and training:
        return streamed_origin(*from_hub(source, job.hub, training=True, streaming=True))
    name, dataset = from_hub(source, job.hub, training=training)

    def numbered(_: Refuse, part: Part | None) -> Iterator[Sample]:
        chosen = dataset if part is None else dataset.select(range(part.start, part.end))
        tables = chosen.with_format("arrow").iter(_BATCH_ROWS)  # images as they are stored
        rows = (row for table in tables for row in table.to_pylist())
        return _numbered(f"{name}: row", rows, 1 if part is None else part.first)

    return Origin(
        name=name,
        identity=str(dataset._fingerprint),
        parts=lambda: row_parts(len(dataset), dataset.data.nbytes),
        samples=numbered,
    )


def streamed_origin(name: str, dataset: Any) -> Origin:
    """Returns the rows of an IterableDataset, whose shards are its parts."""
    shards = [Part(start=shard, end=shard + 1, first=1, num_rows=0) for shard in range(dataset.num_shards)]

    def numbered(_: Refuse, part: Part | None) -> Iterator[Sample]:
        if part is None:
            return _numbered(f"{name}: row", dataset, 1)
        return _numbered(f"{name}: shard {part.start}, row", dataset.shard(len(shards), part.start), part.first)

    return Origin(name=name, identity=f"{name} {len(shards)}", parts=lambda: shards, samples=numbered)


def _numbered(before: str, rows: Iterable[Mapping[str, Any]], first: int) -> Iterator[Sample]:
    for number, row in enumerate(rows, start=first):
        values = {column: without_missing(value) for column, value in row.items()}
        yield Sample(where=f"{before} {number}", row=values)


EVAL_SPLITS = ("validation", "valid", "dev", "eval", "test")
"""Splits for evaluation, in order of preference."""


def from_hub(source: DataSource, hub: Hub, *, training: bool, streaming: bool = False) -> tuple[str, Any]:
    """Returns a split of a data set on a hub, with a name for messages: the named one, `train`, or one for evaluation.

    With `streaming` it is an IterableDataset, whose rows are read when they are asked for. Raises InvalidConfig for an
    unknown data set or split, EnvironmentProblem if the hub cannot be reached.
    """
    data = source.path
    try:
        splits = _from_modelscope(source, streaming) if hub is Hub.MODELSCOPE else _from_hugging_face(source, streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise InvalidConfig(
            f'data is "{data}", which is neither a file nor a data set on the hub: {first_line(error)}',
            hint="Check the name; for a gated data set, set HF_TOKEN.",
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise EnvironmentProblem(
            f'the data set "{data}" cannot be loaded: {first_line(error)}',
            hint="Use a local file, or set HF_ENDPOINT to a reachable mirror.",
        ) from error
    except ValueError as error:
        raise InvalidConfig(f'the data set "{data}" cannot be loaded: {first_line(error)}') from error
    split = source.split or _choose(data, list(splits), training=training)
    return f"{data} ({split})", splits[split]


def _choose(data: str, names: list[str], *, training: bool) -> str:
    wanted = ("train",) if training else EVAL_SPLITS
    split = next((name for name in wanted if name in names), None)
    if split is None and len(names) == 1 and (training or names != ["train"]):
        split = names[0]
    if split is None:
        purpose = "train on" if training else "evaluate on"
        raise InvalidConfig(
            f'the data set "{data}" has no split to {purpose} (one of {", ".join(wanted)}); it has {", ".join(names)}',
            hint="Save the split as a JSONL file, and use that.",
        )
    return split


def _from_hugging_face(source: DataSource, streaming: bool) -> Mapping[str, Any]:
    """Returns the splits by name; only the named one, which may be a slice such as `train[:5%]`, if there is one."""
    subset = [source.subset] if source.subset is not None else []
    options = {"streaming": True} if streaming else {}
    if source.split is None:
        splits: Mapping[str, Any] = datasets.load_dataset(source.path, *subset, **options)
        return splits
    return {source.split: datasets.load_dataset(source.path, *subset, split=source.split, **options)}


def _from_modelscope(source: DataSource, streaming: bool) -> Mapping[str, Any]:
    if streaming:
        problem = f'the data set "{source.path}" cannot be streamed from ModelScope, which dstrain only downloads'
        raise InvalidConfig(problem, hint="Download it, and name its files as data.")
    try:
        from modelscope.msdatasets import MsDataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise EnvironmentProblem(
            f'the data set "{source.path}" needs modelscope, which cannot be imported: {error}',
            hint='pip install "modelscope[datasets]"',
        ) from error
    named = {"subset_name": source.subset, "split": source.split}
    loaded = MsDataset.load(source.path, **{name: value for name, value in named.items() if value is not None})
    splits = loaded if isinstance(loaded, Mapping) else {source.split or "train": loaded}
    return {name: _plain(split) for name, split in splits.items()}


def _plain(split: Any) -> Any:
    return split.to_hf_dataset() if hasattr(split, "to_hf_dataset") else split


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
        return self.sets[chunk.rows].of(chunk.origin, chunk.part, None).parsed(refuse)


def endless_rows(job: Job) -> list[EndlessRows]:
    """Returns the training data of a job: with weights one for each data set, else one for all of them.

    Raises InvalidConfig if a data set cannot be streamed.
    """
    sources = job.train_sources
    sets = [rows_of(source, job, training=True).detected() for source in sources]
    total = sum(origin.path.stat().st_size for rows in sets for origin in rows.origins if origin.path)
    # many chunks shuffle well, few keep the list of them and the record of progress short
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
