"""Records of a calibration: a run's measurements, and the change of a constant."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run, as far as it counts; None for what it did not measure, or what must not be fitted."""

    name: str
    """Name in messages."""
    workload: Workload
    """Model and machines, with the present calibration."""
    configuration: Configuration
    """The configuration that ran."""
    step_s: float | None = None
    """Seconds of a step."""
    error_ratio: float = 0.0
    """Standard error of these, over them."""
    reserved_bytes: int | None = None
    """Peak of the allocator's memory on the fullest rank."""
    outside_bytes: int | None = None
    """GPU memory outside of PyTorch, the median of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant of the planner, before and after."""

    name: str
    """The field of `Measured`."""
    old: float
    """Value in use: a prior, or an earlier calibration."""
    new: float | None
    """Fitted value; None if it stays."""
    error_ratio: float | None = None
    """Half the width of the range that the true value is in for 9 of 10 runs, over `new`."""
    is_uncertain: bool = False
    """Whether the runs narrow its range by less than half."""
    kept: str | None = None
    """Why it stays."""


TEN_PERCENT_TAILS = 1.645
"""Standard deviations on either side that hold 90 % of a normal distribution."""
