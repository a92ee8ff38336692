"""Counts the rows of data files, and estimates how many there are in files that take long to read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from dstrain.facts.data.columnar import groups_of, is_columnar
from dstrain.facts.data.rows import entries, holds_list

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
