"""Divides data files into parts, so that several processes read a file together."""

from __future__ import annotations

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
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowException as error:
        raise InvalidConfig(f"{path}: cannot be read as Parquet: {error}") from None
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    return row_parts(metadata.num_rows, sum(group.total_byte_size for group in groups))


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
