"""Reads the rows of data files (JSON lines, a JSON list, Parquet, Arrow), divides them into parts, and counts them."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from dstrain.errors import EnvironmentProblem, InvalidConfig, did_you_mean, nearest
from dstrain.facts.data import columnar, line_forms
from dstrain.facts.data.columnar import Group, columnar_rows, groups_of, is_columnar, reads_any_row
from dstrain.facts.data.columns import without_missing

SUFFIXES = (".jsonl", ".json", *columnar.SUFFIXES)
"""File name extensions; the first byte of a JSON file decides whether it holds lines or a list."""

_FIRST_ROWS = 1024
"""Rows that are read of Parquet and Arrow in place of a number of bytes."""
_SPREAD_BYTES = 32 * 2**20
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of a data file."""

    where: str
    """`file:line`, or `file: row N` (from 1) in Parquet and Arrow."""
    row: dict[str, Any]
    """Column → value."""
    folder: Path | None = None
    """Folder of the file, to which paths in it are relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive rows of a data file, which are read without those before them."""

    start: int
    """Its first byte, or one before its first line; in Parquet and Arrow its first row, from 0."""
    end: int
    """The byte or row after its last one, or a byte of its last line; of a JSON list unused."""
    first: int
    """Number of its first line or row, from 1; 0 if it is not known."""
    num_rows: int
    """Its lines or rows, empty lines included, perhaps only about; 0 of a JSON list."""


def entries(path: Path, limit_bytes: int | None, part: Part | None = None) -> Iterator[Sample | InvalidConfig]:
    """Yields the rows of a file or of a part of it, and an error for each invalid one.

    Raises InvalidConfig if the file as a whole is wrong.
    """
    require_file(path)
    try:
        if is_columnar(path):
            yield from _columnar(path, limit_bytes, part=part)
        elif part is None and holds_list(path):
            yield from _list_items(path, limit_bytes)
        elif part is not None and not part.num_rows:
            yield from _list_items(path, None)
        else:
            yield from _lines(path, limit_bytes, part)
    except OSError as error:
        raise EnvironmentProblem(f"{path}: cannot be read: {error.strerror or error}") from error


def spread(path: Path, count: int) -> tuple[list[Sample | InvalidConfig], int | None]:
    """Returns about `count` rows, or up to twice as many, spread evenly over a file, and how many it has.

    Of Parquet and Arrow it has the first rows of a few groups. The number is None if not all rows were read. Raises
    InvalidConfig if the file as a whole is wrong.
    """
    require_file(path)
    if is_columnar(path):
        return list(_columnar(path, None, count=count)), None
    if holds_list(path) or path.stat().st_size <= _SPREAD_BYTES:
        rows = list(entries(path, None))
        return rows[:: max(1, len(rows) // count)], len(rows)
    return list(_distant_lines(path, count)), None


def _distant_lines(path: Path, count: int) -> Iterator[Sample | InvalidConfig]:
    """Yields the first line after each of `count` places: one after a random place is as long as any."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(count):
            offset = size * number // count
            file.seek(offset)
            if number:
                file.readline()
            line = file.readline()
            if line.strip(_SPACE):
                yield _line(f"{path}: byte {offset}", line, path, file.tell() - len(line))


def require_file(path: Path) -> None:
    """Raises InvalidConfig if a path is no data file, or an empty one."""
    if path.is_dir():
        raise InvalidConfig(
            f"{path}: is a folder; data must be one file", hint=f"Give a {', '.join(SUFFIXES)} file in it."
        )
    require_there(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidConfig(
            f'{path}: unknown file name extension "{path.suffix}"', hint=did_you_mean(path.suffix.lower(), SUFFIXES)
        )
    if path.stat().st_size == 0:
        raise InvalidConfig(f"{path}: the file is empty")
    if not is_columnar(path) and (error := line_forms.other_kind(path)) is not None:
        raise error


def require_there(path: Path) -> None:
    """Raises InvalidConfig if a path does not exist, with the closest name beside it."""
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        raise InvalidConfig(f"{path}: no such file", hint=f'Did you mean "{path.parent / near}"?' if near else None)


def holds_list(path: Path) -> bool:
    """Returns whether the first character other than white space opens a JSON list."""
    with path.open("rb") as file:
        while block := file.read(4096).removeprefix(b"\xef\xbb\xbf"):
            if text := block.lstrip(_SPACE):
                return text.startswith(b"[")
    return False


def _lines(path: Path, limit_bytes: int | None, part: Part | None) -> Iterator[Sample | InvalidConfig]:
    first, end = (1, limit_bytes) if part is None else (part.first, part.end)
    with path.open("rb") as file:
        if part is not None and part.start:
            file.seek(part.start - 1)
            file.readline()  # a part begins with the first line that begins in it
        position = file.tell()
        for number, line in enumerate(file, start=first):
            if end is not None and position >= end:
                return
            where = f"{path}:{number}" if first else f"{path}: byte {position}"
            if line.strip(_SPACE):
                yield _line(where, line, path, position)
            position += len(line)


def _line(where: str, line: bytes, path: Path, start: int) -> Sample | InvalidConfig:
    """Returns the row of a line that begins at a byte of a file. Raises InvalidConfig if no line of the file is one."""
    text = line.removeprefix(b"\xef\xbb\xbf") if start == 0 else line
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InvalidConfig(f"{where}:{error.start + 1}: not UTF-8", hint="Save the file as UTF-8.")
    except RecursionError:
        return InvalidConfig(f"{where}:1: nested too deeply")
    except ValueError as error:  # also of a number of thousands of digits
        return line_forms.error_of(path, where, text, start, error)
    return _object(where, value, path)


def _object(where: str, value: Any, path: Path) -> Sample | InvalidConfig:
    if isinstance(value, dict):
        return Sample(where=where, row=value, folder=path.parent)
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    hint = line_forms.within_text(path, value) if isinstance(value, str) else None
    return InvalidConfig(f"{where}: is {kinds.get(type(value), 'null')}; a sample must be an object", hint=hint)


def _list_items(path: Path, limit_bytes: int | None) -> Iterator[Sample | InvalidConfig]:
    with path.open("rb") as file:
        raw = file.read() if limit_bytes is None else file.read(limit_bytes)
        cut = bool(file.read(1))
    try:
        # a limit in bytes may cut a character in two
        text = raw.decode("utf-8-sig", errors="ignore" if cut else "strict")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InvalidConfig(f"{path}:{line}: not UTF-8", hint="Save the file as UTF-8.") from None
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    position = _skip(text, text.index("[") + 1)
    while position < len(text) and text[position] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
            position = _skip(text, position)
            if position < len(text) and text[position] not in ",]":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        except json.JSONDecodeError as error:
            # the last object of a part of a file is cut, too
            if not (cut and _at_end(error)):
                raise line_forms.error_in_list(path, text, error) from None
            return
        yield _object(f"{path}:{line}", value, path)
        position = _skip(text, position + 1) if text[position : position + 1] == "," else position
    if position >= len(text) and not cut:
        raise InvalidConfig(f"{path}:{text.count(chr(10)) + 1}: the list is not closed")


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _at_end(error: json.JSONDecodeError) -> bool:
    """Returns whether an item is invalid only because reading stopped in the middle of it."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc) - len("false\\u00")


def _columnar(
    path: Path, limit_bytes: int | None, *, count: int | None = None, part: Part | None = None
) -> Iterator[Sample | InvalidConfig]:
    between = None if part is None else (part.start, part.end)
    is_cut = limit_bytes is not None and path.stat().st_size > limit_bytes
    rows = columnar_rows(path, between=between, count=count)
    for number, row in enumerate(islice(rows, _FIRST_ROWS) if is_cut else rows, start=part.first if part else 1):
        values = {name: without_missing(value) for name, value in row.items()}
        yield Sample(where=f"{path}: row {number}", row=values, folder=path.parent)


_READ_BYTES = 2**20
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
    while block := file.read(_READ_BYTES):
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


_COUNTED_BYTES = 256 * 2**20
"""Bytes of lines that are read whole: under a second from a disk of 0.5 GB/s."""
_BLOCKS, _BLOCK_BYTES = 256, 2**18
"""Blocks that are read of more bytes, evenly spaced."""
_CONFIDENCE = 1.96
"""Standard errors on each side that hold the true value 19 times of 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEstimate:
    """The basis of an estimated number of rows."""

    read_bytes: int
    """Bytes of lines that were read."""
    total_bytes: int
    """Bytes of all lines."""
    error_ratio: float
    """Half the width of the range that holds the number 19 times of 20, over the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCount:
    """The number of rows of data files."""

    number: int
    """Empty lines included."""
    estimate: RowEstimate | None = None
    """None if they were counted."""

    @property
    def most(self) -> int:
        """The number, or twice the error of an estimate above it."""
        return self.number if self.estimate is None else math.ceil(self.number * (1 + 2 * self.estimate.error_ratio))


def count_rows(files: Sequence[Path]) -> RowCount:
    """Returns the number of rows of data files: counted up to 256 MiB of lines, beyond them estimated from 64 MiB.

    Parquet and Arrow say how many they have; a JSON list is read whole. The estimate is the bytes times the line ends
    per byte, in blocks at even distances, so that the order of the rows does not matter. Raises InvalidConfig for a
    file that cannot be read.
    """
    number, lines = 0, list[Path]()
    for file in files:
        if is_columnar(file):
            number += sum(group.num_rows for group in groups_of(file))
        elif holds_list(file):
            number += sum(1 for _ in entries(file, None))
        else:
            lines.append(file)
    sizes = [file.stat().st_size for file in lines]
    if sum(sizes) <= _COUNTED_BYTES:
        return RowCount(number=number + sum(map(_line_ends, lines)))
    blocks = _blocks(lines, sizes)
    read_bytes, ends = (sum(column) for column in zip(*blocks, strict=True))
    estimated = round(sum(sizes) * ends / read_bytes)
    squares = sum((count - ends * size / read_bytes) ** 2 for size, count in blocks)
    # a ratio estimator: blocks that differ much in lines per byte make the estimate less certain
    error = _CONFIDENCE * math.sqrt(squares * len(blocks) / (len(blocks) - 1)) / max(1, ends)
    total = max(1, number + estimated)
    estimate = RowEstimate(read_bytes=read_bytes, total_bytes=sum(sizes), error_ratio=error * max(1, estimated) / total)
    return RowCount(number=total, estimate=estimate)


def joined(counts: Sequence[tuple[int, RowEstimate | None]]) -> RowEstimate | None:
    """Returns the basis of a sum, given its parts, some of which are estimated; None if none is.

    >>> half = RowEstimate(read_bytes=1, total_bytes=9, error_ratio=0.04)
    >>> joined([(300, half), (100, None)])
    RowEstimate(read_bytes=1, total_bytes=9, error_ratio=0.03)
    """
    parts = [(number, estimate) for number, estimate in counts if estimate is not None]
    if not parts:
        return None
    error = math.sqrt(sum((number * estimate.error_ratio) ** 2 for number, estimate in parts))
    return RowEstimate(
        read_bytes=sum(estimate.read_bytes for _, estimate in parts),
        total_bytes=sum(estimate.total_bytes for _, estimate in parts),
        error_ratio=error / max(1, sum(number for number, _ in counts)),
    )


def _line_ends(file: Path) -> int:
    """Returns the number of lines, of which the last one need not be ended."""
    number, block = 0, b"\n"
    with file.open("rb") as opened:
        for block in iter(partial(opened.read, _BLOCK_BYTES), b""):
            number += block.count(b"\n")
    return number + (not block.endswith(b"\n"))


def _blocks(files: Sequence[Path], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the bytes of each block, and the line ends in it; the files are as one."""
    ends, total, blocks = list(accumulate(sizes)), sum(sizes), []
    for number in range(_BLOCKS):
        place = (2 * number + 1) * total // (2 * _BLOCKS)
        index = bisect_right(ends, place)
        with files[index].open("rb") as opened:
            opened.seek(place - ends[index] + sizes[index])
            block = opened.read(_BLOCK_BYTES)
        blocks.append((len(block), block.count(b"\n")))
    return blocks
