"""Divides data files into parts, so that several processes read a file together."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from dstrain.errors import InvalidConfig
from dstrain.facts.data.columnar import Group, groups_of, is_columnar, reads_any_row
from dstrain.facts.data.rows import Part, holds_list, require_file

_BLOCK_BYTES = 2**20
_LEAST_BYTES, _MOST_BYTES, _FEWEST_PARTS = 2**20, 32 * 2**20, 64


def parts_of(path: Path) -> list[Part]:
    """Returns the parts of a data file, the same for the same file: 1 to 32 MiB of lines or of a table's rows.

    A JSON list is one part. Reads the file once to find the ends of lines. Raises InvalidConfig if it is no data file.
    """
    require_file(path)
    if is_columnar(path):
        groups = groups_of(path)
        return row_parts(sum(group.num_rows for group in groups), sum(group.size_bytes for group in groups))
    if holds_list(path):
        return [Part(start=0, end=0, first=1, num_rows=0)]
    with path.open("rb") as file:
        return _of_lines(file, part_bytes(path.stat().st_size))


def streamed_parts(path: Path, size_bytes: int) -> list[Part]:
    """Returns parts of about `size_bytes` of lines or of Arrow, and the row groups of Parquet; the rows are not read.

    Raises InvalidConfig if it is no data file, or a JSON list, whose items cannot be found without reading all of it.
    """
    require_file(path)
    if is_columnar(path):
        limit = size_bytes if reads_any_row(path) else _MOST_BYTES
        return [part for group in groups_of(path) for part in _slices(group, limit)]
    if holds_list(path):
        raise InvalidConfig(f"{path}: a JSON list cannot be streamed", hint="Write it as JSON lines, Parquet or Arrow.")
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


def _slices(group: Group, size_bytes: int) -> list[Part]:
    """Returns a group in equal parts of at most `size_bytes`, or of a row."""
    end = group.start + group.num_rows
    step = -(-group.num_rows // max(1, -(-group.size_bytes // size_bytes))) or 1
    return [
        Part(start=start, end=min(start + step, end), first=start + 1, num_rows=min(step, end - start))
        for start in range(group.start, end, step)
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
