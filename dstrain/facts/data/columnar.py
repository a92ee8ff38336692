"""Reads Parquet and Arrow files: the groups of their rows, and the rows of some groups or of a range."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from dstrain.errors import InvalidConfig

SUFFIXES = (".parquet", ".arrow")
"""File name extensions."""

_BATCH_ROWS = 1024
"""The most rows that are in memory at a time."""
_BATCH_BYTES = 32 * 2**20
"""The most bytes of these: fewer rows of images than of texts."""
_SPREAD_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that are stored together: a row group of Parquet, a record batch of Arrow."""

    start: int
    """Its first row, from 0."""
    num_rows: int
    size_bytes: int
    """Bytes of its columns, uncompressed."""


def is_columnar(path: Path) -> bool:
    """Returns whether a file is Parquet or Arrow by its name.

    >>> is_columnar(Path("train.ARROW")), is_columnar(Path("train.jsonl"))
    (True, False)
    """
    return path.suffix.lower() in SUFFIXES


def reads_any_row(path: Path) -> bool:
    """Returns whether a row is read without those before it in its group."""
    return path.suffix.lower() == ".arrow"


def groups_of(path: Path) -> tuple[Group, ...]:
    """Returns the groups of a file; their rows are not read. Raises InvalidConfig if the file cannot be read."""
    with _readable(path):
        return _opened(path).groups


def columnar_rows(
    path: Path, *, between: tuple[int, int] | None = None, count: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, column → value.

    `between` limits them to those from one number, from 0, up to another; `count` to about as many in all, the first
    ones of a few groups. Raises InvalidConfig if the file cannot be read.
    """
    with _readable(path):
        table = _opened(path)
        if between is not None:
            batches = _between(table, *between)
        elif count is not None:
            batches = _heads(table, count)
        else:
            batches = table.batches(range(len(table.groups)), _batch_rows(table))
        for batch in batches:
            yield from batch.to_pylist()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises InvalidConfig in place of pyarrow's errors; the one of a file that ends too early is an OSError."""
    import pyarrow  # type: ignore[import-untyped]

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidConfig(f"{path}: cannot be read as {path.suffix[1:].title()}: {error}") from None


class _Parquet:
    """The rows of a Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet  # type: ignore[import-untyped]

        self._file = pyarrow.parquet.ParquetFile(path)
        metadata = [self._file.metadata.row_group(group) for group in range(self._file.num_row_groups)]
        self.groups = _numbered([(group.num_rows, group.total_byte_size) for group in metadata])

    def batches(self, groups: Sequence[int], num_rows: int) -> Iterator[Any]:
        """Yields the rows of groups, at most `num_rows` at a time."""
        yield from self._file.iter_batches(batch_size=num_rows, row_groups=list(groups))


class _Arrow:
    """The rows of an Arrow file or stream, as `datasets` writes it, which is mapped into memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        with path.open("rb") as file:
            is_stream = file.read(6) != b"ARROW1"
        mapped = pyarrow.memory_map(str(path))
        if is_stream:
            self._batches = list(pyarrow.ipc.open_stream(mapped))
        else:
            reader = pyarrow.ipc.open_file(mapped)
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self.groups = _numbered([(batch.num_rows, batch.nbytes) for batch in self._batches])

    def batches(self, groups: Sequence[int], num_rows: int) -> Iterator[Any]:
        """Yields the rows of groups, at most `num_rows` at a time."""
        for group in groups:
            for start in range(0, self.groups[group].num_rows, num_rows):
                yield self._batches[group].slice(start, num_rows)


def _numbered(sizes: Sequence[tuple[int, int]]) -> tuple[Group, ...]:
    """Returns groups, given the rows and bytes of each."""
    starts = accumulate((num_rows for num_rows, _ in sizes), initial=0)
    return tuple(
        Group(start=start, num_rows=num_rows, size_bytes=size_bytes)
        for start, (num_rows, size_bytes) in zip(starts, sizes, strict=False)
    )


def _opened(path: Path) -> _Parquet | _Arrow:
    """Opens a file. Raises InvalidConfig if it is not complete, and the errors of pyarrow."""
    if path.suffix.lower() == ".arrow":
        stamp = path.stat()
        return _mapped(path, stamp.st_size, stamp.st_mtime_ns)
    with path.open("rb") as file:
        opening = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        if opening != b"PAR1" or file.read(4) != b"PAR1":
            raise InvalidConfig(f"{path}: not a complete Parquet file (it must begin and end with PAR1)")
    return _Parquet(path)


@lru_cache(maxsize=64)
def _mapped(path: Path, size_bytes: int, changed_ns: int) -> _Arrow:
    """Returns an Arrow file, whose batches are located once: parts of it are read one after another."""
    return _Arrow(path)


def _heads(table: _Parquet | _Arrow, count: int) -> Iterator[Any]:
    """Yields the first rows of evenly spaced groups, `count` rows together."""
    groups = range(0, len(table.groups), max(1, len(table.groups) // _SPREAD_GROUPS))
    for group in groups:
        yield from islice(table.batches([group], -(-count // len(groups))), 1)


def _batch_rows(table: _Parquet | _Arrow) -> int:
    """Returns the rows that are in memory at a time."""
    num_rows = sum(group.num_rows for group in table.groups)
    size_bytes = sum(group.size_bytes for group in table.groups)
    return min(_BATCH_ROWS, max(1, num_rows * _BATCH_BYTES // max(1, size_bytes)))


def _between(table: _Parquet | _Arrow, start: int, end: int) -> Iterator[Any]:
    """Yields the rows from one number up to another, from the groups that hold them."""
    ends = [group.start + group.num_rows for group in table.groups]
    numbers = range(bisect_right(ends, start), bisect_left(ends, end) + 1)
    position = table.groups[numbers[0]].start
    for batch in table.batches(numbers, _batch_rows(table)):
        first, after = max(start - position, 0), min(end - position, len(batch))
        if first < after:
            yield batch.slice(first, after - first)
        position += len(batch)
        if position >= end:
            return
