"""How fast a run steps, and when it has stood still for too long."""

from __future__ import annotations

from collections import deque
from statistics import median

from dstrain.pulse import Phase

TIMES = 5
"""A run hangs when it takes this many times its median step."""
LEAST_S = 60.0
"""And at least this long: a step of a tenth of a second may well be followed by one of two."""
_LEAST_STEPS = 3
_KEPT = 100


class Pace:
    """The steps of a run, as its slowest rank does them."""

    def __init__(self, num_ranks: int, least_s: float = LEAST_S) -> None:
        """Watches `num_ranks` ranks; a run hangs after `least_s` seconds at the earliest, never where that is 0."""
        self._num_ranks = num_ranks
        self._least_s = least_s
        self._durations: deque[float] = deque(maxlen=_KEPT)
        self._at: float | None = None
        self._step = -1
        self._busy: set[int] = set()
        self.steps: dict[int, int] = {}
        """Rank → steps done."""

    def note(self, rank: int, step: int, phase: Phase, now: float) -> None:
        """Takes what a rank said at a time in seconds."""
        self.steps[rank] = step
        was_busy = bool(self._busy)
        (self._busy.discard if phase is Phase.STEP else self._busy.add)(rank)
        if len(self.steps) < self._num_ranks:
            return
        slowest = min(self.steps.values())
        if slowest > self._step:
            if self._at is not None and not was_busy and self._step >= 0:
                self._durations.append((now - self._at) / (slowest - self._step))
            self._step, self._at = slowest, now
        elif was_busy and not self._busy:
            self._at = now

    @property
    def limit_s(self) -> float | None:
        """Seconds without a step after which the run hangs; None while that is not known."""
        if self._least_s <= 0 or len(self._durations) < _LEAST_STEPS:
            return None
        return max(TIMES * median(self._durations), self._least_s)

    @property
    def median_s(self) -> float | None:
        """Seconds of a step; None before there were any."""
        return median(self._durations) if self._durations else None

    def stood_still_s(self, now: float) -> float | None:
        """Returns for how long nothing has moved, once that is too long; None otherwise."""
        limit = self.limit_s
        if limit is None or self._at is None or self._busy or now - self._at <= limit:
            return None
        return now - self._at
