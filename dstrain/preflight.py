"""The record of the checks before the first step: `preflight.json`, which ranks write and `dstrain report` shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dstrain.findings import SIGNS, Severity
from dstrain.records import type_config

Figures = Mapping[str, float | tuple[float | None, ...] | None]
SCHEMA = 1
"""Version of the file."""


class CheckName(StrEnum):
    """The checks, in this order."""

    LABELS = "labels"
    """Two samples are shown with the text that has loss."""
    WORST_BATCH = "worst batch"
    """Forward and backward of the heaviest micro-batch fit into memory."""
    FIRST_LOSS = "first loss"
    """The loss of that micro-batch is not far above a guessing model's."""
    GRADIENTS = "gradients"
    """Loss and gradients are finite on every rank."""
    TEMPLATE = "chat template"
    """The model knows the job's chat template as well as its own, if the job names one."""
    PACKING = "packing"
    """A packed row has the loss of its samples."""
    EVALUATION = "evaluation"
    """The heaviest micro-batch of an evaluation fits into memory."""
    GENERATION = "generation"
    """The model generates from the longest prompt of `samples`, if the job has any."""
    SAVING = "saving"
    """A checkpoint can be written, and those that exist at once fit on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a run."""

    __pydantic_config__ = type_config

    name: CheckName
    passed: bool | None
    """None: it was skipped."""
    text: str
    """The finding or, of a skipped check, the reason, in words."""
    examples: tuple[str, ...] = ()
    """Samples, with marks around the text that has loss."""
    seconds: float = 0.0
    """Time that it took on rank 0; 0 if an earlier check has measured what it needs."""
    figures: Figures = field(default_factory=dict)
    """Measurements by name: losses, norms of each rank, tokens. None: not finite."""

    @property
    def line(self) -> str:
        """Returns the check as a line of text.

        >>> Check(name=CheckName.GRADIENTS, passed=True, text="norm 1.2 on 2 ranks", seconds=0.04).line
        '✓ gradients: norm 1.2 on 2 ranks (0.04 s)'
        """
        mark = "-" if self.passed is None else SIGNS[Severity.OK if self.passed else Severity.ERROR]
        took = f" ({self.seconds:.2g} s)" if self.seconds else ""
        return f"{mark} {self.name}: {self.text}{took}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The checks before the first step of the last start."""

    __pydantic_config__ = type_config

    schema: int = SCHEMA
    """Version of the file."""
    step: int
    """Optimizer steps done before; above 0 in a run that was resumed."""
    checks: tuple[Check, ...]
    seconds: float
    """Time of all checks on rank 0."""
    limit_s: float
    """Time after which no further check begins."""


def finite(figures: Figures) -> Figures:
    """Returns figures with None, which JSON can say, in place of those that are not finite."""

    def valid(value: float | None) -> float | None:
        return value if value is None or math.isfinite(value) else None

    return {
        key: tuple(map(valid, value)) if isinstance(value, tuple) else valid(value) for key, value in figures.items()
    }
