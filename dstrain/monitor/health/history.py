"""The logged windows that rules look at, with robust statistics (pure, without torch)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOWS = 128
"""Logged windows that are kept. Source: OLMo-core's SkipStepOptimizer compares with 128 steps."""
FEWEST = 20
"""Windows before something is compared with their median. Source: torch-level spike detectors need 20 to 64 steps."""
_SMALLEST_SCALE = 0.01
"""Smallest scale of a deviation, as a share of the median: a series that hardly varies would make any change large."""
_EMA_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a run before its first step; None if unknown."""

    is_cross_entropy: bool = True
    """Whether the loss is that of tokens, which neither begins above that of guessing nor becomes 0."""
    vocab_size: int | None = None
    """Tokens of the vocabulary."""
    max_grad_norm: float = 0.0
    """Norm at which gradients are clipped; 0: never."""
    device_bytes: int | None = None
    """Memory of a GPU."""


class History:
    """The last windows of a run, oldest first."""

    def __init__(self, facts: Facts) -> None:
        """Starts without windows."""
        self.facts = facts
        self.windows: deque[Mapping[str, Any]] = deque(maxlen=WINDOWS)
        """Metrics of a window each, with `step`."""
        self.evaluations: list[float] = []
        """Evaluation losses."""
        self.first_norms: list[float] = []
        """The first gradient norms of the run, `FEWEST` of them."""
        self.num_windows = 0
        """All windows since the start."""
        self.loss_ratios: deque[tuple[int, float]] = deque(maxlen=WINDOWS)
        """(step, moving average of the loss over its best so far)."""
        self.peaks_by_rank: list[float] = []
        """Largest peak of each rank so far, in bytes."""
        self._average = self._best = math.nan

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds the metrics of one logged window, or of an evaluation."""
        if "eval_loss" in values:
            self.evaluations.append(values["eval_loss"])
        if "loss" not in values:
            return
        elapsed = values["step"] - self.windows[-1]["step"] if self.windows else 0
        self.windows.append(values)
        self.num_windows += 1
        self._follow_loss(values, elapsed)
        norm = values.get("grad_norm")
        if isinstance(norm, float) and math.isfinite(norm) and len(self.first_norms) < FEWEST:
            self.first_norms.append(norm)
        peaks = values.get("peak_bytes_by_rank") or []
        earlier = self.peaks_by_rank or [0.0] * len(peaks)
        self.peaks_by_rank = [max(pair) for pair in zip(earlier, peaks, strict=True)] if peaks else earlier

    def _follow_loss(self, values: Mapping[str, Any], elapsed: int) -> None:
        loss = values["loss"]
        if not math.isfinite(loss):
            return
        if math.isnan(self._average):
            self._average = self._best = loss
        self._average += (1 - math.exp(-elapsed / _EMA_STEPS)) * (loss - self._average)
        self._best = min(self._best, self._average)
        self.loss_ratios.append((values["step"], self._average / self._best if self._best > 0 else 1.0))

    def newest(self, name: str) -> float | None:
        """Returns a metric of the newest window, None if it has none that is finite."""
        value = self.windows[-1].get(name) if self.windows else None
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def series(self, name: str) -> list[float]:
        """Returns the finite values of a metric, oldest first."""
        values = (window.get(name) for window in self.windows)
        return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]

    def since(self, steps: int) -> list[Mapping[str, Any]]:
        """Returns the windows of the last `steps` steps; none if the history is shorter."""
        if not self.windows or self.windows[-1]["step"] - self.windows[0]["step"] < steps:
            return []
        first = self.windows[-1]["step"] - steps
        return [window for window in self.windows if window["step"] > first]


def deviation(value: float, others: Sequence[float]) -> float:
    """Returns how far a value is above the median of others, in standard deviations by their MAD.

    >>> deviation(2.0, [1.0, 1.1, 0.9, 1.0, 1.2])
    6.744...
    """
    middle = median(others)
    scale = 1.4826 * median(abs(other - middle) for other in others)
    scale = max(scale, _SMALLEST_SCALE * abs(middle), 1e-12)
    return (value - middle) / scale
