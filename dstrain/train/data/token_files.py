"""Files of samples in tokens: written whole, read by memory map."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow  # type: ignore[import-untyped]

IMAGES, VIDEOS = MEDIA = ("images", "videos")
"""Columns with the files of images, and with those of each video."""
NUMBERS = datasets.List(datasets.Value("int32"))
"""Type of a column with a list of numbers for each sample."""
_FILES = datasets.List(datasets.Value("string"))
MEDIA_TYPES = {IMAGES: _FILES, VIDEOS: datasets.List(_FILES)}
"""Type of each column with a list of files, or of frames, for each sample."""
FIGURES = ("length", "num_learned", "num_cut", "num_images", "num_videos")
_BATCH_ROWS = 1000
_SAID = b"dstrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sample in tokens."""

    columns: Mapping[str, Sequence[Any]]
    """Lists of numbers, or lists of such, and of files; empty ones if there is nothing to learn."""
    length: int = 0
    """Tokens; 0 if there is nothing to learn."""
    num_learned: int = 0
    num_cut: int = 0
    num_images: int = 0
    num_videos: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Key of `COUNTED` → number."""
    where: str = ""
    """Its place, such as file and line."""


def features_of(columns: Mapping[str, Any]) -> datasets.Features:
    """Returns the columns of a file, given those that the Trainer reads: also figures of each sample and a checksum."""
    figures = {name: datasets.Value("int32") for name in FIGURES}
    return datasets.Features({**columns, **figures, "crc": datasets.Value("uint32")})


class TokenFile:
    """Collects samples for one file."""

    def __init__(self, features: datasets.Features) -> None:
        """`features`: those of `features_of`."""
        self._schema = features.arrow_schema
        self._columns = {
            name: _Numbers() if kind == NUMBERS else _Values(self._schema.field(name).type)
            for name, kind in features.items()
            if name not in (*FIGURES, "crc")
        }
        self._figures: dict[str, array[int]] = {name: array("i") for name in FIGURES}
        self._crcs = array("I")
        self._batches: list[Any] = []
        self.num_samples = 0

    def add(self, sample: TokenRow) -> None:
        """Adds a sample."""
        crc = 0
        for name, values in sample.columns.items():
            crc = self._columns[name].add(values, crc)
        for name, figures in self._figures.items():
            figures.append(getattr(sample, name))
        self._crcs.append(crc)
        self.num_samples += 1
        if len(self._crcs) == _BATCH_ROWS:
            self._end_batch()

    def _end_batch(self) -> None:
        arrays = {name: column.taken() for name, column in self._columns.items()}
        arrays |= {name: pyarrow.array(np.array(figures, np.int32)) for name, figures in self._figures.items()}
        arrays["crc"] = pyarrow.array(np.array(self._crcs, np.uint32))
        for figures in (*self._figures.values(), self._crcs):
            del figures[:]
        self._batches.append(pyarrow.record_batch([arrays[name] for name in self._schema.names], schema=self._schema))

    def write(self, path: Path, said: Mapping[str, Any]) -> None:
        """Writes the samples, and what is said about them, which `said_in` returns."""
        self._end_batch()
        table = pyarrow.Table.from_batches(self._batches, schema=self._schema).combine_chunks()
        metadata = {**self._schema.metadata, _SAID: json.dumps(said).encode()}
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, self._schema.with_metadata(metadata)) as stream,
        ):
            stream.write_table(table)


def said_in(path: Path) -> dict[str, Any]:
    """Returns what was said about the samples of a file."""
    with pyarrow.memory_map(str(path)) as file:
        said: dict[str, Any] = json.loads(pyarrow.ipc.open_stream(file).schema.metadata[_SAID])
        return said


def read(paths: Iterable[Path], features: datasets.Features, fingerprint: str) -> datasets.Dataset:
    """Returns the samples of files as one data set, mapped into memory."""
    tables = [datasets.table.MemoryMappedTable.from_file(str(path)) for path in paths]
    table = datasets.table.concat_tables(tables) if tables else features.arrow_schema.empty_table()
    info = datasets.DatasetInfo(features=features)
    return datasets.Dataset(arrow_table=table, info=info, fingerprint=fingerprint)


class _Numbers:
    """A column with a list of numbers for each sample."""

    def __init__(self) -> None:
        self._values, self._ends = array("i"), array("i", [0])

    def add(self, numbers: Sequence[int], crc: int) -> int:
        """Adds the numbers of a sample, and returns the checksum with them."""
        values = array("i", numbers)
        self._values.extend(values)
        self._ends.append(len(self._values))
        return zlib.crc32(values, crc)

    def taken(self) -> Any:
        """Returns the samples so far as an Arrow array, and starts anew."""
        ends, values = (pyarrow.array(np.array(numbers, np.int32)) for numbers in (self._ends, self._values))
        self.__init__()  # type: ignore[misc]
        return pyarrow.ListArray.from_arrays(ends, values)


class _Values:
    """A column with lists of lists of numbers, of strings, or of lists of strings."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._rows: list[Sequence[Any]] = []

    def add(self, values: Sequence[Any], crc: int) -> int:
        """Adds the values of a sample, and returns the checksum with them."""
        self._rows.append(values)
        if values and isinstance(values[0], str):
            return zlib.crc32("\n".join(values).encode(), crc)
        for part in values:
            is_text = bool(part) and isinstance(part[0], str)
            crc = zlib.crc32("\n".join([*part, ""]).encode() if is_text else array("i", part), crc)
        return crc

    def taken(self) -> Any:
        """Returns the samples so far as an Arrow array, and starts anew."""
        rows, self._rows = self._rows, []
        return pyarrow.array([list(row) for row in rows], self._kind)
