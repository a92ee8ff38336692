"""Result of a check, before it is noted with its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dstrain.errors import DstrainError
from dstrain.preflight import Check, CheckName

Figures = Mapping[str, float | tuple[float | None, ...] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a check."""

    passed: bool
    text: str
    figures: Figures = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    ends: DstrainError | None = None
    """The error that ends the run for it; None: the run goes on."""

    def check(self, name: CheckName, seconds: float) -> Check:
        """Returns the check with its cost; figures that are not finite become None, which JSON can say."""

        def valid(value: float | None) -> float | None:
            return value if value is None or math.isfinite(value) else None

        figures = {
            key: tuple(map(valid, value)) if isinstance(value, tuple) else valid(value)
            for key, value in self.figures.items()
        }
        return Check(
            name=name,
            passed=self.passed,
            text=self.text,
            examples=self.examples,
            seconds=round(seconds, 4),
            figures=figures,
        )
