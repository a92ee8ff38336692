"""Detects a hang from the pace of the steps."""

from __future__ import annotations

from collections import deque
from statistics import median

from dstrain.heartbeat import STARTING, Phase
from dstrain.launch.failure.outcome import Start
from dstrain.launch.timeouts import TIMEOUTS

TIMES = 5
"""A run hangs when it takes this many times its median step, or its longest evaluation or checkpoint."""
LONG_TIMES = 10
"""An evaluation or a checkpoint may take at least this many times as long: shared disks are slow at times."""
_SLOW_DISK = 20e6
"""Bytes per second that the slowest disk writes: a first checkpoint may take as long as it needs."""
_LEAST_STEPS = 3
_KEPT = 100
_LONG = frozenset({Phase.SAVING, Phase.EVALUATING})


class HangDetector:
    """The steps of a run, as its slowest rank does them."""

    def __init__(
        self, num_ranks: int, least_s: float = TIMEOUTS.hang_s, start_s: float = 0.0, saved_bytes: int = 0
    ) -> None:
        """Watches `num_ranks` ranks; a run hangs after `least_s` seconds at the earliest (0: never), since a step of
        0.1 s may well be followed by one of 2 s.

        Before their first step, ranks may take `start_s` seconds from one phase or count to the next, and as long for
        anything whose pace is unknown; 0 for any time. A checkpoint has `saved_bytes`.
        """
        self._num_ranks = num_ranks
        self._least_s = least_s
        self._start_s = start_s
        self._saving_s = saved_bytes / _SLOW_DISK
        self._began: float | None = None
        self._news_at = 0.0
        self._heard: dict[int, tuple[Phase, int]] = {}
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._longest_s: dict[Phase, float] = {}
        self._gap_s = 0.0
        self._phases: dict[int, Phase] = {}
        self.phase = Phase.START
        """What the ranks are doing; of several phases one that is not a step."""
        self._at = 0.0
        self.steps: dict[int, int] = {}
        """Rank → steps done."""

    def begin(self, now: float) -> None:
        """Records when ranks are started."""
        self._began = self._news_at = now

    def start(self, now: float) -> Start | None:
        """Returns the progress of the start; None before it, and once every rank has done its first step."""
        phases = {rank: self._phases.get(rank) for rank in range(self._num_ranks)}
        if self._began is None or all(phase is not None and phase not in STARTING for phase in phases.values()):
            return None
        return Start(seconds=now - self._began, phases=phases)

    def note(self, rank: int, step: int, phase: Phase, now: float, *, count: int = 0) -> None:
        """Records the report of a rank at a time in seconds; `count` is the progress of a phase that counts something
        else."""
        if self._heard.get(rank) != (phase, count):
            self._heard[rank], self._news_at = (phase, count), now
        before, was = min(self.steps.values(), default=0), self.phase
        self.steps[rank], self._phases[rank] = step, phase
        if len(self.steps) < self._num_ranks:
            return
        others = [other for other in self._phases.values() if other is not Phase.STEP]
        self.phase = others[0] if others else Phase.STEP
        gained = min(self.steps.values()) - before
        if gained <= 0 and self.phase is was and phase is not Phase.EVALUATING:  # which reports its micro-batches
            return
        if was is Phase.STEP and gained > 0:
            self._steps_s.extend([(now - self._at) / gained] * min(gained, _KEPT))
        elif was in _LONG:
            self._gap_s = max(self._gap_s, now - self._at)
            if self.phase is not was:
                self._longest_s[was] = max(self._longest_s.get(was, 0.0), self._gap_s)
                self._gap_s = 0.0
        self._at = now

    @property
    def limit_s(self) -> float | None:
        """Seconds without news after which the run hangs; None for never.

        The first steps, evaluation and checkpoint, and the end of a run, have the limit of a start, or more.
        """
        if self._least_s <= 0:
            return None
        steps_s, longest_s = self._steps_s, self._longest_s
        if self.phase is Phase.STEP and len(steps_s) >= _LEAST_STEPS:
            return max(TIMES * median(steps_s), self._least_s)
        if self.phase in longest_s:
            return max(TIMES * longest_s[self.phase], LONG_TIMES * self._least_s)
        if self._start_s <= 0:
            return None
        if self.phase is Phase.STEP:
            return max(self._start_s, self._least_s, TIMES * max(steps_s, default=0.0))
        longest = max(longest_s.values(), default=0.0)
        return max(self._start_s, self._saving_s, LONG_TIMES * self._least_s, TIMES * longest)

    @property
    def median_s(self) -> float | None:
        """Seconds of a step; None before there were any."""
        return median(self._steps_s) if self._steps_s else None

    def stood_still_s(self, now: float) -> float | None:
        """Returns the time without progress, once that is too long; None otherwise."""
        start = self.start(now)
        if start is not None:
            return now - self._news_at if 0 < self._start_s < now - self._news_at else None
        limit = self.limit_s
        return None if limit is None or now - self._at <= limit else now - self._at
