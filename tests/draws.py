"""Samples of sweeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Draws the sample of a sweep."""

    seed: int
    """The same seed draws the same, whatever was drawn before."""
    draws_all: bool
    """Whether everything is tried."""

    def __call__(self, population: Sequence[Item], size: int, salt: object = "") -> list[Item]:
        """Returns so many of the population, in its order; all of it under --all-draws. Another salt draws others."""
        if self.draws_all or size >= len(population):
            return list(population)
        chosen = random.Random(f"{self.seed} {salt}").sample(range(len(population)), size)
        return [population[index] for index in sorted(chosen)]
