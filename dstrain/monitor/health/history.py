"""The logged windows that rules look at, with robust statistics (pure, without torch)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

WINDOWS = 128
"""Logged windows that are kept. Source: OLMo-core's SkipStepOptimizer compares with 128 steps."""
FEWEST = 20
"""Windows before something is compared with their median. Source: torch-level spike detectors need 20 to 64 steps."""
FIRST = 512
"""First windows whose losses say whether the loss falls at all."""
FALLEN = 3.0
"""Standard errors of a fall from which the loss has fallen: a flat one seems to have in one of 100 runs."""
_SMALLEST_SCALE = 0.01
"""Smallest scale of a deviation, as a share of the median: a series that hardly varies would make any change large."""
_EMA_STEPS = 50
_LOADS = ("expert_load_max_over_mean", "dead_experts", "experts")
_RESUMED = ("step", "loss", "grad_norm", "learning_rate", *_LOADS)
"""Metrics that a resumed run compares with its earlier start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run before its first step; None if unknown."""

    is_cross_entropy: bool = True
    """Whether the loss is a mean over tokens, which neither begins above a guessing model's nor becomes 0."""
    vocab_size: int | None = None
    """Tokens of the vocabulary."""
    max_grad_norm: float = 0.0
    """Norm at which gradients are clipped; 0: never."""
    device_bytes: int | None = None
    """Memory of a GPU."""
    host_bytes: int | None = None
    """RAM of a node."""


class History:
    """The last windows of a run, oldest first."""

    def __init__(self, facts: Facts) -> None:
        """Starts without windows."""
        self.facts = facts
        self.windows: deque[Mapping[str, Any]] = deque(maxlen=WINDOWS)
        """Metrics of a window each, with `step`."""
        self.evaluations: list[float] = []
        """Evaluation losses."""
        self.first_losses: list[float] = []
        """The first losses of the run, `FIRST` of them."""
        self.has_fallen = False
        """Whether the loss has clearly fallen since the start, at any window so far."""
        self.first_norms: list[float] = []
        """The first gradient norms of the run, `FEWEST` of them."""
        self.first_loads: list[Mapping[str, Any]] = []
        """The first windows with the load of experts, `FEWEST` of them."""
        self.checkpoint_s: list[float] = []
        """Seconds of each checkpoint of this start."""
        self.replayed_loss: float | None = None
        """The newest window's loss before the run was resumed; only of the first window of a start."""
        self._earlier_losses: dict[int, float] = {}
        self.num_windows = 0
        """All windows since the start."""
        self._average = self._best = math.nan
        self.last_good_step = 0
        """The step before the one at which the moving average of the loss was lowest: that loss is of these weights."""

    def resume(self, lines: Iterable[Mapping[str, Any]], *, step: int, repeats: bool = True) -> None:
        """Takes over what an earlier start logged: the loss and gradients up to a step, and the losses to repeat.

        Speed and memory begin anew: a run may be resumed on other machines. Another number of ranks draws other random
        numbers and sums in another order, so that it does not repeat losses.
        """
        lines = [line for line in lines if isinstance(line.get("loss"), float)]
        for line in lines:
            if line["step"] <= step:
                self.add({name: line[name] for name in _RESUMED if line.get(name) is not None})
        if repeats and any(line["step"] == step for line in lines):  # otherwise windows begin elsewhere than before
            self._earlier_losses = {line["step"]: line["loss"] for line in lines if line["step"] > step}

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds the metrics of one logged window, or of an evaluation."""
        if "eval_loss" in values:
            self.evaluations.append(values["eval_loss"])
        if "loss" not in values:
            return
        elapsed = values["step"] - self.windows[-1]["step"] if self.windows else 0
        self.windows.append(values)
        self.num_windows += 1
        self.replayed_loss, self._earlier_losses = self._earlier_losses.get(values["step"]), {}
        if "checkpoint_s" in values:
            self.checkpoint_s.append(values["checkpoint_s"])
        self._follow_loss(values, elapsed)
        norm = values.get("grad_norm")
        if isinstance(norm, float) and math.isfinite(norm) and len(self.first_norms) < FEWEST:
            self.first_norms.append(norm)
        if "dead_experts" in values and len(self.first_loads) < FEWEST:
            self.first_loads.append({name: values[name] for name in _LOADS})

    def _follow_loss(self, values: Mapping[str, Any], elapsed: int) -> None:
        loss = values["loss"]
        if not math.isfinite(loss):
            return
        if len(self.first_losses) < FIRST:
            self.first_losses.append(loss)
            fall, error = self.fall
            self.has_fallen |= len(self.first_losses) >= FEWEST and fall > FALLEN * error
        if math.isnan(self._average):
            self._average = self._best = loss
        self._average += (1 - math.exp(-elapsed / _EMA_STEPS)) * (loss - self._average)
        if self._average <= self._best:
            self._best, self.last_good_step = self._average, values["step"] - 1

    @property
    def fall(self) -> tuple[float, float]:
        """By how much the second half of the first losses is below the first half, as a share, and the error of that.

        The error is the standard error of both means, from the scatter within each half.
        """
        middle = len(self.first_losses) // 2
        halves = self.first_losses[:middle], self.first_losses[middle:]
        if middle < 2 or (before := fmean(halves[0])) <= 0:
            return 0.0, math.inf
        means = before, fmean(halves[1])
        squares = (sum((one - mean) ** 2 for one in half) for half, mean in zip(halves, means, strict=True))
        error = math.sqrt(
            sum(square / len(half) / (len(half) - 1) for square, half in zip(squares, halves, strict=True))
        )
        return 1 - means[1] / before, error / before

    def with_metric(self, name: str) -> list[Mapping[str, Any]]:
        """Returns the windows that have a metric, oldest first; windows of an earlier start have few."""
        return [window for window in self.windows if name in window]

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
