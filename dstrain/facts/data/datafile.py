"""Reads and checks data files: JSON lines, JSON lists and Parquet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.choices import DataFormat
from dstrain.errors import EnvironmentProblem, InvalidConfig, did_you_mean, nearest
from dstrain.facts.data.sample_formats import require, to_messages, unused, unused_text

SUFFIXES = (".jsonl", ".json", ".parquet")
"""File name extensions; the first byte of a JSON file decides whether it holds lines or a list."""

Refuse = Callable[[InvalidConfig], None]
"""Called with the error of an unusable row: raises it, or returns to skip the row."""

_SHOWN_PROBLEMS = 5
_BATCH_ROWS = 1024
_BLOCK_BYTES = 2**20
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of a data file."""

    where: str
    """`file:line`, or `file: row N` (from 1) in Parquet."""
    row: dict[str, Any]
    """Column → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The contents of a valid data file."""

    format: DataFormat
    """Never `auto`."""
    columns: tuple[str, ...]
    """Column names, in order of appearance."""
    rows_checked: int
    """Number of rows that were parsed as conversations."""
    complete: bool
    """Whether these are all rows."""
    unused: Mapping[str, int]
    """Unused column, such as `source`, or `messages.name` in turns → number of checked rows with it."""

    @property
    def note(self) -> str | None:
        """A line about unused columns, or None."""
        if not self.unused:
            return None
        scope = "" if self.complete else f", of the first {self.rows_checked:,}"
        return unused_text(self.unused) + scope


def is_file_name(data: str) -> bool:
    """Returns whether `data` of a job is a file rather than the id of a data set on a hub.

    >>> is_file_name("data/train.jsonl"), is_file_name("tatsu-lab/alpaca")
    (True, False)
    """
    return data.startswith((".", "/", "~")) or data.lower().endswith(SUFFIXES) or Path(data).exists()


def check(
    path: str | Path, data_format: DataFormat, *, limit_bytes: int | None = None, skip: bool = False
) -> DataReport:
    """Returns the contents of a data file, after parsing the rows in its first `limit_bytes` as conversations.

    Raises InvalidConfig with up to five problems, one per line, each with file and line; with `skip` only if no row is
    usable.
    """
    source = Path(path)
    columns: dict[str, None] = {}
    ignored: Counter[str] = Counter()
    problems: list[str] = []
    hints: list[str] = []
    rows_checked = 0
    useful = False
    for entry in _entries(source, limit_bytes):
        try:
            if isinstance(entry, InvalidConfig):
                raise entry
            data_format = format_of(str(path), list(entry.row), data_format) if rows_checked == 0 else data_format
            rows_checked += 1
            columns.update(dict.fromkeys(entry.row))
            to_conversation(entry, data_format)
            ignored.update(unused(entry.row, data_format))
        except InvalidConfig as error:
            problems.append(error.problem)
            hints += [error.hint] if error.hint else []
            if (len(problems) == _SHOWN_PROBLEMS and not (skip and useful)) or data_format is DataFormat.AUTO:
                break
        else:
            useful = True
    if problems and not (skip and useful):
        more = [f"{source}: stopped after {_SHOWN_PROBLEMS} problems"] if len(problems) == _SHOWN_PROBLEMS else []
        raise InvalidConfig("\n".join(problems + more), hint="\n".join(dict.fromkeys(hints)) or None)
    if rows_checked == 0:
        raise InvalidConfig(f"{source}: no samples")
    complete = limit_bytes is None or source.stat().st_size <= limit_bytes
    return DataReport(
        format=data_format, columns=tuple(columns), rows_checked=rows_checked, complete=complete, unused=dict(ignored)
    )


def stop(error: InvalidConfig) -> None:
    """Raises the error of a row."""
    raise error


def samples(path: str | Path, refuse: Refuse = stop) -> Iterator[Sample]:
    """Yields every row of a data file in order; errors of unreadable rows go to `refuse`."""
    empty = True
    for entry in _entries(Path(path), None):
        if isinstance(entry, InvalidConfig):
            refuse(entry)
            continue
        empty = False
        yield entry
    if empty:
        raise InvalidConfig(f"{path}: no samples")


def num_rows(path: str | Path) -> int:
    """Returns the approximate number of rows, without parsing them; 0 for a JSON list."""
    source = Path(path)
    if source.suffix.lower() == ".parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]

        return int(pyarrow.parquet.read_metadata(source).num_rows)
    if _holds_list(source):
        return 0
    with source.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(partial(file.read, _BLOCK_BYTES), b""))


def to_conversation(sample: Sample, data_format: DataFormat) -> list[dict[str, str]] | str:
    """Returns `sample_formats.to_messages` of a row. Raises InvalidConfig with file and line."""
    try:
        return to_messages(sample.row, data_format)
    except InvalidConfig as error:
        raise InvalidConfig(f"{sample.where}: {error.problem}", hint=error.hint) from None


def format_of(name: str, columns: list[str], data_format: DataFormat) -> DataFormat:
    """Returns the format, detected if it is `auto`. Raises InvalidConfig with the file's name."""
    try:
        return require(columns, data_format)
    except InvalidConfig as error:
        raise InvalidConfig(f"{name}: {error.problem}", hint=error.hint) from None


def _entries(path: Path, limit_bytes: int | None) -> Iterator[Sample | InvalidConfig]:
    """Yields rows, and an error for each invalid one. Raises InvalidConfig if the file as a whole is wrong."""
    _require_file(path)
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet(path, limit_bytes)
        elif _holds_list(path):
            yield from _list_items(path, limit_bytes)
        else:
            yield from _lines(path, limit_bytes)
    except OSError as error:
        raise EnvironmentProblem(f"{path}: cannot be read: {error.strerror or error}") from error


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise InvalidConfig(
            f"{path}: is a folder; data must be one file", hint=f"Give a {', '.join(SUFFIXES)} file in it."
        )
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        raise InvalidConfig(f"{path}: no such file", hint=f'Did you mean "{path.parent / near}"?' if near else None)
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidConfig(
            f'{path}: unknown file name extension "{path.suffix}"', hint=did_you_mean(path.suffix.lower(), SUFFIXES)
        )
    if path.stat().st_size == 0:
        raise InvalidConfig(f"{path}: the file is empty")


def _holds_list(path: Path) -> bool:
    """Returns whether the first character other than white space opens a JSON list."""
    with path.open("rb") as file:
        while block := file.read(4096).removeprefix(b"\xef\xbb\xbf"):
            if text := block.lstrip(_SPACE):
                return text.startswith(b"[")
    return False


def _lines(path: Path, limit_bytes: int | None) -> Iterator[Sample | InvalidConfig]:
    seen_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if limit_bytes is not None and seen_bytes >= limit_bytes:
                return
            seen_bytes += len(line)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip(_SPACE):
                continue
            yield _line(f"{path}:{number}", line)


def _line(where: str, line: bytes) -> Sample | InvalidConfig:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InvalidConfig(f"{where}:{error.start + 1}: not UTF-8", hint="Save the file as UTF-8.")
    except json.JSONDecodeError as error:
        return InvalidConfig(f"{where}:{error.colno}: {error.msg[:1].lower()}{error.msg[1:]}")
    except RecursionError:
        return InvalidConfig(f"{where}:1: nested too deeply")
    return _object(where, value)


def _object(where: str, value: Any) -> Sample | InvalidConfig:
    if isinstance(value, dict):
        return Sample(where=where, row=value)
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return InvalidConfig(f"{where}: is {kinds.get(type(value), 'null')}; a sample must be an object")


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
                message = f"{error.msg[:1].lower()}{error.msg[1:]}"
                raise InvalidConfig(f"{path}:{error.lineno}:{error.colno}: {message}") from None
            return
        yield _object(f"{path}:{line}", value)
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


def _parquet(path: Path, limit_bytes: int | None) -> Iterator[Sample | InvalidConfig]:
    with path.open("rb") as file:
        opening = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        if opening != b"PAR1" or file.read(4) != b"PAR1":
            raise InvalidConfig(f"{path}: not a complete Parquet file (it must begin and end with PAR1)")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield Sample(where=f"{path}: row {number}", row=row)
            if limit_bytes is not None and path.stat().st_size > limit_bytes:
                return
    except pyarrow.ArrowException as error:
        raise InvalidConfig(f"{path}: cannot be read as Parquet: {error}") from None
