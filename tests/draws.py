"""Sweeps: tests with very many cases, of which a run has one of several fixed parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

Item = TypeVar("Item")
Place = tuple[int, int]
"""In which part of how many a test is."""
MOST_PARTS = 144
"""So many runs, each with the next part, try everything."""


def part_of(name: str, parts: int, at: int | None = None) -> Place:
    """Returns in which of so many parts a test is: `at`, or what follows from its node id alone.

    All tests of a case are in one part, so that one run of it serves them; numbered cases are dealt evenly.
    """
    assert MOST_PARTS % parts == 0, f"{name}: {parts} parts do not share out {MOST_PARTS} runs"
    case = name.partition("[")[2].removesuffix("]") or name
    number = at if at is not None else int(case) if case.isdecimal() else crc32(case.encode())
    return number % parts, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The part of each sweep that this run has."""

    part: int | None
    """The number of the run; None: everything is tried."""

    def has(self, place: Place) -> bool:
        """Returns whether a test in that part of so many is tried."""
        return self.part is None or self.part % place[1] == place[0]

    def __call__(self, population: Sequence[Item], size: int) -> list[Item]:
        """Returns this part of a population, in its order: at least so many, and more if MOST_PARTS are too few."""
        parts = min(MOST_PARTS, max(1, len(population) // size))
        return list(population) if self.part is None else list(population)[self.part % parts :: parts]
