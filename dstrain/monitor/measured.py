"""What a run measured, from the lines of `metrics.jsonl`: seconds of a step, data wait, memory of each rank (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dstrain.monitor.windows import settled
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """What one rank measured; None for what a CPU does not have."""

    __pydantic_config__ = type_config

    peak_bytes: int | None
    """Peak of allocated GPU memory (torch's max_memory_allocated)."""
    reserved_bytes: int | None
    """Peak of GPU memory reserved by PyTorch's allocator (torch's max_memory_reserved)."""
    outside_bytes: int | None
    """The most GPU memory in use and not reserved by PyTorch: context, NCCL, other processes."""
    data_wait_s: float | None
    """Seconds of a step spent waiting for the data loader, the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run measured. The time of windows that warm up does not count (`windows.settled`), their memory does."""

    __pydantic_config__ = type_config

    windows: int
    """Logging windows whose time counts."""
    steps: int
    """Steps of these."""
    step_s: float | None
    """Seconds of a step, the median of the windows; None without a window that counts."""
    error_ratio: float
    """Standard error of that, over itself: scatter of the windows."""
    tokens_per_s: float | None
    """Tokens per second on all GPUs, padding included, the median."""
    tokens_per_step: float
    """The most tokens of a step, padding included, on all GPUs."""
    data_wait_share: float
    """Share of the time that the slowest rank waits for data, the median."""
    alloc_retries: float
    """Cache flushes of the allocator on all ranks, from the first step on."""
    ranks: tuple[RankMeasurement, ...]
    """Each rank's own; empty without a window."""
    warm_up_steps: int = 0
    """Steps whose time does not count."""


def measurement(lines: Sequence[Mapping[str, Any]]) -> Measurement:
    """Returns what the logged steps of a run measured.

    >>> lines = [{"step": n, "tokens": 8, "tokens_per_s": 4.0, "step_s": 2.0, "padding_share": 0.0} for n in (1, 2, 3)]
    >>> found = measurement(lines)
    >>> found.windows, found.step_s, found.tokens_per_step
    (2, 2.0, 8.0)
    """
    windows = [line for line in lines if line.get("tokens") and line.get("step_s") and line.get("tokens_per_s")]
    steady = settled(windows)
    counted = steady.windows
    times = [float(line["step_s"]) for line in counted]
    rates = [float(line["tokens_per_s"]) / _kept(line) for line in counted]
    shares = [float(line.get("data_wait_share") or 0.0) for line in counted]
    retries = [float(line.get("alloc_retries") or 0.0) for line in windows]
    return Measurement(
        windows=len(counted),
        steps=round(sum(map(_steps, counted))),
        step_s=median(times) if times else None,
        error_ratio=_error_ratio(times),
        tokens_per_s=median(rates) if rates else None,
        tokens_per_step=max((float(line["tokens"]) / _kept(line) / _steps(line) for line in windows), default=0.0),
        data_wait_share=median(shares) if shares else 0.0,
        alloc_retries=retries[-1] - retries[0] if retries else 0.0,
        ranks=_ranks(windows),
        warm_up_steps=steady.warm_up_steps,
    )


NOISE = 2.0
"""Standard errors by which medians must differ to be called different: 19 of 20 equal ones do not."""


def is_slower(one: Measurement, other: Measurement) -> bool:
    """Returns whether the median step of a run is slower than that of another by more than the scatter within both.

    >>> lines = [{"step": n, "tokens": 8, "tokens_per_s": 4.0, "step_s": 2.0} for n in (1, 2, 3)]
    >>> slow = [{**line, "step_s": 2.1} for line in lines]
    >>> is_slower(measurement(lines), measurement(lines)), is_slower(measurement(slow), measurement(lines))
    (False, True)
    """
    if one.step_s is None or other.step_s is None:
        return False
    noise_s = NOISE * math.hypot(one.step_s * one.error_ratio, other.step_s * other.error_ratio)
    return one.step_s - other.step_s > noise_s


def _kept(line: Mapping[str, Any]) -> float:
    """Returns the share of a window's tokens that are no padding."""
    return max(1e-9, 1.0 - float(line.get("padding_share") or 0.0))


def _steps(line: Mapping[str, Any]) -> float:
    """Returns the steps of a window: its seconds over those of a step."""
    return max(1.0, float(line["tokens"]) / float(line["tokens_per_s"]) / float(line["step_s"]))


def _error_ratio(times: Sequence[float]) -> float:
    """Returns the standard error of the median of these times, over it, from their median absolute deviation."""
    if len(times) < 2:
        return 0.0
    middle = median(times)
    return 1.2533 * 1.4826 * median(abs(time - middle) for time in times) / middle / math.sqrt(len(times))


def _ranks(windows: Sequence[Mapping[str, Any]]) -> tuple[RankMeasurement, ...]:
    count = max((len(line.get("data_wait_s_by_rank") or ()) for line in windows), default=0)

    def values(key: str, rank: int) -> list[float]:
        rows = [line.get(key) or () for line in windows]
        return [float(row[rank]) for row in rows if len(row) > rank and row[rank] is not None]

    def most(key: str, rank: int) -> int | None:
        return round(max(values(key, rank))) if values(key, rank) else None

    return tuple(
        RankMeasurement(
            peak_bytes=most("peak_bytes_by_rank", rank),
            reserved_bytes=most("reserved_bytes_by_rank", rank),
            outside_bytes=most("outside_bytes_by_rank", rank),
            data_wait_s=median(waits) if (waits := values("data_wait_s_by_rank", rank)) else None,
        )
        for rank in range(count)
    )
