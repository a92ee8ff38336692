"""Reads the rows of a data file: JSON lines, a JSON list, Parquet or Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.errors import EnvironmentProblem, InvalidConfig, did_you_mean, nearest
from dstrain.facts.data import columnar, line_forms
from dstrain.facts.data.columnar import columnar_rows, is_columnar
from dstrain.facts.data.row_values import without_missing

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
