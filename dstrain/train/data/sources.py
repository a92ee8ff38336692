"""Reads the data sets of a job as conversations and texts: files, globs, and data sets on a hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import (
    Refuse,
    files_of,
    is_file_name,
    num_rows,
    parsed,
    reading_of,
    samples,
)
from dstrain.facts.data.job_reading import reading_for
from dstrain.facts.data.preferences import Pair
from dstrain.facts.data.row_values import without_missing
from dstrain.facts.data.rows import Sample
from dstrain.facts.data.sample_formats import SIDES, Reading, unused
from dstrain.facts.data.turns import Conversation
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one data set."""

    name: str
    """File, glob or data set id, for messages."""
    identity: str
    """Changes with the rows."""
    each: Callable[[Refuse], Iterator[Sample]]
    """Yields all rows in order; errors of unreadable ones go to its argument."""
    count: Callable[[], int]
    """Returns their approximate number; 0 if unknown."""
    reading: Reading
    """As the job says."""
    max_samples: int | None
    unused: Counter[str] = field(default_factory=Counter)
    """Unused column → number of rows with it, of those read so far."""

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

    def sides(self, refuse: Refuse) -> Iterator[tuple[str, Conversation]]:
        """Yields both conversations of each pair, the chosen one first, with their places."""
        for where, pair in self.pairs(refuse):
            for name, side in zip(SIDES, pair.sides, strict=True):
                yield f"{where}, {name}", side

    def _parsed(self, refuse: Refuse) -> Iterator[tuple[str, Conversation | str | Pair]]:
        return islice(self._all_parsed(refuse), self.max_samples)

    def _all_parsed(self, refuse: Refuse) -> Iterator[tuple[str, Conversation | str | Pair]]:
        reading = None
        for sample in self.each(refuse):
            reading = reading or reading_of(self.name, list(sample.row), self.reading)
            try:
                found = parsed(sample, reading)
            except InvalidConfig as error:
                refuse(error)
                continue
            self.unused.update(unused(sample.row, reading))
            yield sample.where, found


def rows_of(source: DataSource, job: Job, *, training: bool) -> Rows:
    """Returns the rows of a data set. Raises InvalidConfig or EnvironmentProblem if it cannot be found."""
    reading = reading_for(source, job)
    if not is_file_name(source.path):
        return _of_hub(source, job, reading, training=training)
    if source.split is not None or source.subset is not None:
        raise InvalidConfig(
            f"{source.path} is a file, which has no split or subset", hint="Use max_samples for its first samples."
        )
    files = files_of(source.path)
    stamps = [(path.resolve(), path.stat() if path.exists() else None) for path in files]
    return Rows(
        name=str(files[0]) if len(files) == 1 else source.path,
        identity="\n".join(
            f"{path} {stamp.st_size} {stamp.st_mtime_ns}" if stamp else str(path) for path, stamp in stamps
        ),
        each=lambda refuse: chain.from_iterable(samples(path, refuse) for path in files),
        count=lambda: _at_most(sum(map(num_rows, files)), source.max_samples),
        reading=reading,
        max_samples=source.max_samples,
    )


def _of_hub(source: DataSource, job: Job, reading: Reading, *, training: bool) -> Rows:
    from dstrain.train.data.hub_datasets import from_hub

    name, dataset = from_hub(source, job.hub, training=training)

    def numbered(_: Refuse) -> Iterator[Sample]:
        for number, row in enumerate(dataset, start=1):
            values = {column: without_missing(value) for column, value in row.items()}
            yield Sample(where=f"{name}: row {number}", row=values)

    return Rows(
        name=name,
        identity=str(dataset._fingerprint),
        each=numbered,
        count=lambda: _at_most(len(dataset), source.max_samples),
        reading=reading,
        max_samples=source.max_samples,
    )


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)
