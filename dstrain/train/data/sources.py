"""Reads the data sets of a job as conversations and texts: files, globs, and data sets on a hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import Refuse, files_of, is_file_name, parsed, reading_of, samples
from dstrain.facts.data.job_reading import reading_for
from dstrain.facts.data.parts import parts_of, row_parts
from dstrain.facts.data.preferences import Pair
from dstrain.facts.data.row_values import without_missing
from dstrain.facts.data.rows import Part, Sample
from dstrain.facts.data.sample_formats import Reading, unused
from dstrain.facts.data.turns import Conversation
from dstrain.job.data_source import DataSource
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

    def conversations(self, refuse: Refuse) -> Iterator[tuple[str, Conversation | str]]:
        """Yields the place of each row, and its conversation or text; errors of unusable rows go to `refuse`."""
        for where, sample in self._parsed(refuse):
            assert not isinstance(sample, Pair)
            yield where, sample

    def pairs(self, refuse: Refuse) -> Iterator[tuple[str, Pair]]:
        """Yields the place of each row, and its pair; errors of unusable rows go to `refuse`."""
        for where, sample in self._parsed(refuse):
            assert isinstance(sample, Pair)
            yield where, sample

    def _parsed(self, refuse: Refuse) -> Iterator[tuple[str, Conversation | str | Pair]]:
        return islice(self._all_parsed(refuse), self.max_samples)

    def _read(self, refuse: Refuse) -> Iterator[Sample]:
        for origin in self.origins:
            yield from origin.samples(refuse, self.part)

    def _all_parsed(self, refuse: Refuse) -> Iterator[tuple[str, Conversation | str | Pair]]:
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
    from dstrain.train.data.hub_datasets import from_hub

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
