"""Damages of a file that leave its size: a flipped bit, 4,000 other bytes, and zeros, as after a loss of power."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_bytes(path: Path) -> None:
    data = path.read_bytes()
    begin = max(0, len(data) // 2 - 2_000)
    changed = bytes(255 - byte for byte in data[begin : begin + 4_000])
    path.write_bytes(data[:begin] + changed + data[begin + 4_000 :])


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


HARMS: Mapping[str, Callable[[Path], None]] = {
    "bit": flip_bit,
    "4,000 bytes": change_bytes,
    "zeros": fill_with_zeros,
}
