"""Divides data files into parts, so that several processes read a file together."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from dstrain.errors import InvalidConfig
from dstrain.facts.data.rows import Part, holds_list, require_file

_BLOCK_BYTES = 2**20
_LEAST_BYTES, _MOST_BYTES, _FEWEST_PARTS = 2**20, 32 * 2**20, 64


def parts_of(path: Path) -> list[Part]:
    """Returns the parts of a data file, the same for the same file: 1 to 32 MiB of lines or of Parquet's rows.

    A JSON list is one part. Reads the file once to find the ends of lines. Raises InvalidConfig if it is no data file.
    """
    require_file(path)
    if path.suffix.lower() == ".parquet":
        return _of_parquet(path)
    if holds_list(path):
        return [Part(start=0, end=0, first=1, num_rows=0)]
    with path.open("rb") as file:
        return _of_lines(file, part_bytes(path.stat().st_size))


def streamed_parts(path: Path, size_bytes: int) -> list[Part]:
    """Returns parts of about `size_bytes` of a data file, of Parquet its row groups; the rows are not read.

    Raises InvalidConfig if it is no data file, or a JSON list, whose items cannot be found without reading all of it.
    """
    require_file(path)
    if path.suffix.lower() == ".parquet":
        return [part for start, rows, size in _row_groups(path) for part in _slices(start, rows, size)]
    if holds_list(path):
        raise InvalidConfig(f"{path}: a JSON list cannot be streamed", hint="Write it as JSON lines or Parquet.")
    size = path.stat().st_size
    return [
        Part(start=start, end=min(start + size_bytes, size), first=0, num_rows=1)
        for start in range(0, size, size_bytes)
    ]


def part_bytes(total_bytes: int) -> int:
    """Returns the bytes of a part of a data set: enough parts for many processes, each of some seconds at most.

    >>> part_bytes(10**6), part_bytes(10**9), part_bytes(10**12)
    (1048576, 15625000, 33554432)
    """
    return min(_MOST_BYTES, max(_LEAST_BYTES, total_bytes // _FEWEST_PARTS))


def row_parts(num_rows: int, total_bytes: int) -> list[Part]:
    """Returns parts of equal rows, given what all of them take.

    >>> [(part.start, part.end) for part in row_parts(5, 2 * 2**20)]
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = max(1, num_rows * part_bytes(total_bytes) // max(1, total_bytes))
    return [
        Part(start=start, end=min(start + rows, num_rows), first=start + 1, num_rows=min(rows, num_rows - start))
        for start in range(0, num_rows, rows)
    ]


def _of_parquet(path: Path) -> list[Part]:
    groups = _row_groups(path)
    return row_parts(sum(rows for _, rows, _ in groups), sum(size for _, _, size in groups))


def _row_groups(path: Path) -> list[tuple[int, int, int]]:
    """Returns the first row of each row group, its number of rows, and its bytes."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowException as error:
        raise InvalidConfig(f"{path}: cannot be read as Parquet: {error}") from None
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    starts = accumulate((group.num_rows for group in groups), initial=0)
    return [(start, group.num_rows, group.total_byte_size) for start, group in zip(starts, groups, strict=False)]


def _slices(start: int, rows: int, size_bytes: int) -> list[Part]:
    """Returns a row group in equal parts of at most `_MOST_BYTES`: a part is read from the beginning of its group."""
    step = -(-rows // max(1, -(-size_bytes // _MOST_BYTES))) or 1
    return [
        Part(
            start=first, end=min(first + step, start + rows), first=first + 1, num_rows=min(step, start + rows - first)
        )
        for first in range(start, start + rows, step)
    ]


def _of_lines(file: BinaryIO, size: int) -> list[Part]:
    """Returns parts of about `size` bytes, each of whole lines."""
    parts: list[Part] = []
    start = position = lines = rows = 0
    is_ended = True
    while block := file.read(_BLOCK_BYTES):
        position += len(block)
        rows += block.count(b"\n")
        is_ended = block.endswith(b"\n")
        if position - start < size:
            continue
        if not is_ended:
            position += len(file.readline())
            rows += 1
        parts.append(Part(start=start, end=position, first=lines + 1, num_rows=rows))
        start, lines, rows, is_ended = position, lines + rows, 0, True
    if position > start:
        parts.append(Part(start=start, end=position, first=lines + 1, num_rows=rows + (not is_ended)))
    return parts
