"""What a broken rule adds in figures: what a change brings, how fast memory fills and how long that takes (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from statistics import median

from dstrain.monitor.health import signals
from dstrain.monitor.health.history import FEWEST, History
from dstrain.units import format_bytes, format_seconds


def packing_gain(_history: History, share: float) -> str:
    """Returns what rows without padding bring: at most 1/(1 - share) times the tokens, `share` of which are padding.

    That holds if every position of a row takes the same time.
    """
    return f"without it, the same time would train up to {1 / max(1 - share, 0.01):.1f} × the tokens"


def memory_pace(history: History, _records: float) -> str:
    """Returns how fast the memory grows that grew longest, and when it is full at that pace."""
    windows = {name: signals.grown_windows(history, name) for name in signals.MEMORIES}
    name = max(windows, key=windows.__getitem__)
    pace = _pace(history, name, windows[name])
    if pace is None:
        return ""
    if name == signals.GPU_PEAK:
        left = _gpu_left(history, pace)
        return f"the GPU's peak grows by {format_bytes(pace)} a step{_until(history, 'the GPU', left)}"
    left = _host_left(history, pace, windows[name])
    return f"a rank's RAM grows by {format_bytes(pace)} a step{_until(history, 'the RAM of its node', left)}"


def _gpu_left(history: History, pace: float) -> float | None:
    """Returns the steps until the fullest GPU is full; None if they are unknown.

    Free is what neither the peak nor other owners (CUDA contexts, NCCL) have. Fragments of the allocator are left out,
    so that memory may end earlier.
    """
    peak, total = history.newest(signals.GPU_PEAK), history.facts.device_bytes
    if total is None or peak is None:
        return None
    outside = max(history.windows[-1].get("outside_bytes_by_rank") or [0.0])
    return float(max(0.0, total - outside - peak) / pace)


def _host_left(history: History, pace: float, windows: int) -> float | None:
    """Returns the steps until the fullest node's RAM is full; None if they are unknown.

    The pace is that of the rank, or of all processes of the node, such as other ranks and data workers, if that is
    faster.
    """
    used, total = "host_used_share", history.facts.host_bytes
    share = history.newest(used)
    share_a_step = max(_pace(history, used, windows) or 0.0, pace / total if total else 0.0)
    return max(0.0, 1 - share) / share_a_step if share is not None and share_a_step else None


def slope(points: Iterable[tuple[float, float]]) -> float | None:
    """Returns the median slope of all pairs of points (Theil-Sen), which single outliers do not move; None below two.

    Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968).

    >>> slope([(1, 10.0), (2, 12.0), (3, 99.0), (4, 16.0), (5, 18.0)])
    2.0
    """
    slopes = [(y - before) / (x - at) for (at, before), (x, y) in combinations(points, 2) if x != at]
    return median(slopes) if slopes else None


def _pace(history: History, name: str, windows: int) -> float | None:
    """Returns by how much a metric grows in a step, over the last windows; None if it does not."""
    recent = list(history.windows)[-windows:]
    found = slope((window["step"], window[name]) for window in recent if window.get(name) is not None)
    return found if found is not None and found > 0 else None


def _until(history: History, what: str, steps: float | None) -> str:
    """Returns when something is full; empty if that is unknown."""
    if steps is None:
        return ""
    seconds = [value for value in history.series("step_s")[-FEWEST:] if value > 0]
    text = f"{steps:,.0f} steps"
    when = f"in about {format_seconds(steps * median(seconds))} ({text})" if seconds else f"in {text}"
    return f"; at this pace {what} is full {when}"
