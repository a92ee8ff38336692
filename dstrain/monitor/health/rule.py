"""The record of a health rule: a signal, the values from which it is a warning or critical, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dstrain.monitor.health.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    signal: Callable[[History], float | None]
    """Measures; None: nothing to say yet."""
    warn: float
    """The signal from which it is a warning."""
    critical: float | None = None
    """The signal from which it is critical; None: never."""
    is_low: bool = False
    """Whether small signals are the bad ones."""
    normal: float = 0.0
    """The signal of a run without the trouble."""
    rank: Callable[[History], int] | None = None
    """Returns the rank to blame; None: it is no single one's fault."""
    problem: str
    """What is wrong, with the signal as `{value}` and the rank to blame as `{rank}`."""
    outlook: Callable[[History, float], str] | None = None
    """Returns what the signal means in figures, as the end of the sentence of `problem`; empty if they are unknown."""
    harms_weights: bool = False
    """Whether checkpoints from after the best step of the loss should not be trained on."""
    advice: str
    """What to do."""
    source: str
    """Where the limits come from."""
