"""Formats and parses bytes, counts and rates; inside dstrain sizes are `int` bytes."""

from __future__ import annotations

import re

from dstrain.errors import InvalidConfig

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Returns bytes for `80GiB`, `512 MiB`, `1.5TB` (decimal), `80G` (binary, as SLURM counts) or a bare number.

    Raises InvalidConfig for anything else, and for a bare number below 1 MiB, which is meant in another unit.

    >>> parse_bytes("80GiB"), parse_bytes("2 TB")
    (85899345920, 2000000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _FACTORS:
        raise InvalidConfig(f'"{text}" is not a size', hint="Write a number and a unit, such as 80GiB or 2TB.")
    if not match[2] and 0 < float(match[1]) < MIB:
        raise InvalidConfig(f'"{text}" has no unit: it would be bytes', hint=f"Write {match[1]}GiB.")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Returns a size in binary units with three figures.

    >>> format_bytes(85899345920), format_bytes(1536), format_bytes(0)
    ('80.0 GiB', '1.50 KiB', '0 B')
    """
    if abs(count) < KIB:
        return f"{count:.0f} B"
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= factor:
            value = count / factor
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("every size of 1 KiB or more has a unit")


def format_sizes(*counts: float) -> list[str]:
    """Returns sizes in the unit of the smallest, so that they can be compared.

    >>> format_sizes(1008 * 2**30, 2**40), format_sizes(512, 2048)
    (['1008 GiB', '1024 GiB'], ['512 B', '2048 B'])
    """
    unit = format_bytes(min(counts)).rpartition(" ")[2]
    factor = 1 if unit == "B" else _FACTORS[unit.lower()]
    sizes = [count / factor for count in counts]
    return [f"{size:.{0 if unit == 'B' or size >= 1000 else 2 if size < 10 else 1}f} {unit}" for size in sizes]


def format_rate(bytes_per_s: float) -> str:
    """Returns a bandwidth with three figures in decimal units, as is usual for links.

    >>> format_rate(42.13e9), format_rate(5.96e6), format_rate(312e9)
    ('42.1 GB/s', '5.96 MB/s', '312 GB/s')
    """
    unit, factor = next((unit for unit in _OF_LINKS if bytes_per_s >= unit[1]), _OF_LINKS[-1])
    value = bytes_per_s / factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}/s"


_OF_LINKS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_count(count: float) -> str:
    """Returns a count of things with a decimal suffix.

    >>> format_count(32_762_123_264), format_count(4096)
    ('32.8 B', '4.10 K')
    """
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= factor:
            value = count / factor
            return f"{value:.{2 if value < 10 else 1}f} {unit}"
    return f"{count:.0f}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Returns a count with its noun; `plural` is its other form if that is not the noun with an s.

    >>> counted(1, "answer"), counted(2048, "answer"), counted(2, "entry", "entries")
    ('1 answer', '2,048 answers', '2 entries')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def format_seconds(seconds: float) -> str:
    """Returns a duration for people.

    >>> format_seconds(0.25), format_seconds(75), format_seconds(7322)
    ('0.25 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.{2 if seconds < 10 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
