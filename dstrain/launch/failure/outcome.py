"""The outcome of a run, as far as its nodes reported it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dstrain.heartbeat import Phase
from dstrain.launch.failure.first_failure import Death


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node that stopped responding."""

    host: str
    """Its name in the hostfile."""
    why: str
    """The last message of the connection, or how long it was silent."""
    at: float
    """When it was last heard of, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The progress of a start before every rank has done its first step."""

    seconds: float
    """Duration so far."""
    phases: Mapping[int, Phase | None]
    """Rank → its phase; None if it has not reported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A run that made no progress."""

    seconds: float
    """How long it has made no progress."""
    median_s: float
    """The median step time before; 0 if it is unknown."""
    steps: Mapping[int, int]
    start: Start | None = None
    """The progress of the start, if the first step was not reached."""
    phase: Phase = Phase.STEP
    """Outcome of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    succeeded: bool
    """Whether every launcher ended well and every rank is known to have done so."""
    code: int
    """The launcher's exit code, negative for a signal; of several the first bad one. 0 alone proves nothing: it is 0
    when `launch` was killed."""
    stopped_by: str | None = None
    """Signal or `dstrain stop` that stopped dstrain; None if nothing did."""
    is_interrupt: bool = False
    """Whether it was Ctrl-C."""
    deaths: tuple[Death, ...] = ()
    """The ranks that failed, in the order in which it was noticed."""
    reported: tuple[str | None, int] | None = None
    """The first failure in a launcher's own log: the node (None: the only one) and the rank's code."""
    lost: tuple[Lost, ...] = ()
    """The nodes that stopped responding, first one first."""
    orphaned: tuple[str, ...] = ()
    """The nodes on which the launcher was killed while its ranks lived on."""
    hang: Hang | None = None
    """The hang, if one was detected."""
    is_port_taken: bool = False
    """Whether rank 0 could not listen on its port."""
    left_at: int | None = None
    """The step after which it saved a checkpoint and left as requested; None if it did not."""
    rank_logs: Mapping[int, Path]
    launcher_logs: tuple[Path, ...]
    """The logs of the launchers themselves."""

    @property
    def launcher_log(self) -> Path:
        """The launcher's log of the node that failed, or the first."""
        return self.launcher_logs[0]
