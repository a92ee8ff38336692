"""Holds back an error in rank 0's output until the run has said which rank failed first."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_ERROR = re.compile(r"^(\[rank\d+\]: ?)?(Traceback \(most recent call last\):|Error: .)", re.MULTILINE)
_MOST_S = 60.0
"""How long an error is held back if no rank does another step; a run that fails ends within that time."""


class HeldOutput:
    """Passes on text, but for an error and what follows it: a rank that lost its peer would seem to be the cause."""

    def __init__(self, pass_on: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._pass_on = pass_on
        self._clock = clock
        self._held = ""
        self._since = 0.0
        self._step: int | None = None

    def take(self, text: str) -> None:
        """Takes a piece of rank 0's output."""
        error = None if self._held else _ERROR.search(text)
        if error is not None:
            self._since, self._step = self._clock(), None
        at = 0 if self._held else len(text) if error is None else error.start()
        self._held += text[at:]
        if at:
            self._pass_on(text[:at])

    def tick(self, step: int | None) -> None:
        """Passes on an error that the run has survived: the slowest rank does steps after it, or time passes."""
        if self._held:
            self._step = step if self._step is None else self._step
            if (step or 0) > (self._step or 0) + 1 or self._clock() - self._since > _MOST_S:
                self.release()

    def release(self) -> None:
        """Passes on what is held back."""
        held, self._held = self._held, ""
        if held:
            self._pass_on(held)

    def drop(self) -> None:
        """Forgets what is held back, since the report of the run says it, or the log."""
        self._held = ""
