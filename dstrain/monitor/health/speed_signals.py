"""What rules about speed measure: one number of the history, or None where it says nothing yet (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from dstrain.monitor.health.history import FEWEST, History

_RECENT_STEPS = 20
"""Steps that are compared with all earlier ones where speed is judged."""
_LASTING_STEPS = 50
_FEW, _MANY = 3, 10
"""Windows that stand for now, if a change is large, and if it is small."""
_MUCH_SLOWER = 1.34
"""Ratio that is told at once. Source: Greyhound: slow phases cost 1.34 times the time on average."""
_STRAGGLER = 0.33
"""Lag of a rank that is clear at once. Source: NVRx: 0.75 of the fastest one's speed."""
_LEAST_NOISE = 0.02
"""Deviation of a rank's lag that is assumed at least."""
_PER_PASS, _PER_TOKEN = "forward_s_by_rank", "forward_s_per_token_by_rank"
_OWN, _QUEUED, _COMMUNICATION = "own_s_by_rank", "queued_s_by_rank", "comm_s_by_rank"
_CPU_WAIT = "cpu_wait_share_by_rank"
_SAME_WAIT = 0.05
"""Share of time by which waiting may grow and count as no longer than before."""
_SAME = 1.1
"""Ratio up to which computation counts as no slower than before."""


def slowdown(history: History) -> float | None:
    """Returns how much longer steps take now, over the last 20, than before, or over 50 if it is less than a third
    longer; per step or per token, whichever is less.

    On shared machines, phases that are a little slower come and go. A batch with more tokens takes longer, and one with
    fewer has fewer of them in a second.
    """
    windows = history.with_metric("step_s")[1:]  # the first compiles and allocates
    fast = _slower(windows, _num_recent(windows, _RECENT_STEPS, _FEW))
    if fast is None or fast >= _MUCH_SLOWER:
        return fast
    slow = _slower(windows, _num_recent(windows, _LASTING_STEPS, _MANY))
    return min(fast, 1.0 if slow is None else slow)


def _slower(windows: Sequence[Mapping[str, Any]], count: int) -> float | None:
    """Returns how much longer steps take in the last windows than before; None if too few are before them."""
    earlier, recent = windows[:-count], windows[-count:]
    if len(earlier) < FEWEST or not all(window.get("tokens_per_s") for window in windows):
        return None

    def ratio(name: str) -> float:
        now, before = (median(float(window[name]) for window in part) for part in (recent, earlier))
        return float(now / before)

    return min(ratio("step_s"), 1 / ratio("tokens_per_s"))


def _num_recent(windows: Sequence[Mapping[str, Any]], steps: int, fewest: int) -> int:
    """Returns the windows of the last steps, at least the fewest."""
    return max(fewest, len([window for window in windows if window["step"] > windows[-1]["step"] - steps]))


def data_wait(history: History) -> float | None:
    """Returns the share of time in which ranks wait for data: the median of the last three windows."""
    shares = history.series("data_wait_share")[1:]
    return median(shares[-_FEW:]) if len(shares) >= _FEW else None


def padding(history: History) -> float | None:
    """Returns the share of padding among all tokens: the median of the last three windows."""
    if not history.facts.is_cross_entropy:  # pairs of answers cannot share rows
        return None
    shares = history.series("padding_share")
    return median(shares[-_FEW:]) if len(shares) >= _FEW else None


def slow_rank(history: History) -> float | None:
    """Returns how much longer the slowest rank works than the fastest, as a share: in whole steps, where it enters
    collectives last and waits least; if collectives are not measured, in forward passes, per pass or per token,
    whichever is less; in each of the last three windows, or ten if it is less than a third; 0 if it is noise.
    """
    lags = _lags(history)
    return max(lags) if lags else None


def slowest_rank(history: History) -> int:
    """Returns the rank that works longest."""
    lags = _lags(history)
    return lags.index(max(lags))


def _lags(history: History) -> list[float]:
    """Returns the value of `slow_rank` for each rank; empty without two ranks or three windows."""
    whole = _lasting(history.with_metric(_OWN)[1:], _OWN, _own_lags)
    return whole or _lasting(history.with_metric(_PER_TOKEN)[1:], _PER_TOKEN, _forward_lags)


def _lasting(
    windows: Sequence[Mapping[str, Any]], name: str, lags_of: Callable[[Mapping[str, Any]], list[float]]
) -> list[float]:
    """Returns the lag of each rank that lasts, or 0; empty without two ranks or three windows.

    The noise is that from one window to the next, so that a rank that has become slow does not hide itself.
    """
    if len(windows) < _FEW or len({len(window[name]) for window in windows} - {0, 1}) != 1:
        return []
    by_rank = list(zip(*map(lags_of, windows), strict=True))
    lags = [0.0] * len(by_rank)
    for rank, of_rank in enumerate(by_rank):
        recent = of_rank[-_MANY:]
        least = min(recent[-_FEW:])
        if least < _STRAGGLER:
            least = min(recent) if len(recent) == _MANY else 0.0
        if least > 3 * _LEAST_NOISE and math.log1p(least) > 3 * _noise(of_rank):
            lags[rank] = least
    return lags


def _forward_lags(window: Mapping[str, Any]) -> list[float]:
    """Returns how much longer a forward pass takes on each rank than on the fastest: per pass or token, as a share.

    Small passes take the same time whatever their tokens, and large ones the time of their tokens.
    """
    fastest, fastest_token = min(window[_PER_PASS]), min(window[_PER_TOKEN])
    pairs = zip(window[_PER_PASS], window[_PER_TOKEN], strict=True)
    return [min(seconds / fastest, per_token / fastest_token) - 1 for seconds, per_token in pairs]


def _own_lags(window: Mapping[str, Any]) -> list[float]:
    """Returns how much longer each rank works in a step than the fastest, as a share.

    On a CPU, a rank works between all that it did not wait, and that without the time in which it had no core: what
    longer times do not have in common is not its own work.
    """
    own, queued = window[_OWN], window.get(_QUEUED) or [0.0] * len(window[_OWN])
    without = [max(seconds - waits, 1e-9) for seconds, waits in zip(own, queued, strict=True)]
    pairs = [[seconds / max(min(times), 1e-9) - 1 for seconds in times] for times in (own, without)]
    return [min(pair) for pair in zip(*pairs, strict=True)]


def _noise(lags: Sequence[float]) -> float:
    """Returns the standard deviation of the logarithm of a rank's time to the fastest one's, by the MAD of its changes.

    Times vary by a share of themselves: of a rank that takes four times as long, the lag varies four times as much.
    """
    changes = (abs(math.log1p(after) - math.log1p(before)) for before, after in pairwise(lags))
    return 1.4826 * median(changes) / math.sqrt(2)


def cpu_wait(history: History) -> float | None:
    """Returns the share of a rank's forward passes for which it was ready to run and other processes had its CPU: the
    median of the last three windows.
    """
    shares = [max(window[_CPU_WAIT]) for window in history.with_metric(_CPU_WAIT)[1:][-_FEW:]]
    return median(shares) if len(shares) == _FEW else None


def rank_without_cpu(history: History) -> int:
    """Returns the rank that waits longest for a CPU."""
    shares = list(history.with_metric(_CPU_WAIT)[-1][_CPU_WAIT])
    return shares.index(max(shares))


def slow_links(history: History) -> float | None:
    """Returns the ratio of `slowdown` if most of the additional time is that of collectives, on the rank that waits
    least, and not for want of a CPU; if that was not measured, unless forward passes, or waiting for data or a CPU,
    take longer than before.
    """
    ratio = slowdown(history)
    windows = history.with_metric("step_s")[1:]
    is_measured = all(window.get(_COMMUNICATION) for window in windows)
    if ratio is None or not (is_measured or all(window.get(_PER_TOKEN) for window in windows)):
        return None
    if ratio <= _SAME:
        return ratio
    recent = _num_recent(windows, _RECENT_STEPS, _FEW)

    def medians(name: str, of: Callable[[Any], float] = max) -> tuple[float, float]:
        values = [value if isinstance(value := window.get(name, 0.0), float) else of(value) for window in windows]
        return median(values[-recent:]), median(values[:-recent])

    if is_measured:
        pairs = medians("step_s"), medians(_COMMUNICATION, min), medians(_QUEUED)
        step, waits, queued = (now - before for now, before in pairs)
        return ratio if waits - max(0.0, queued) > step / 2 else 0.0
    forward, forward_before = medians(_PER_PASS)
    waits_of = [medians(name) for name in ("data_wait_share", _CPU_WAIT) if all(name in window for window in windows)]
    waits_more = any(now > before + _SAME_WAIT for now, before in waits_of)
    return 0.0 if waits_more or forward > _SAME * forward_before else ratio


def bus_bandwidth(history: History) -> float | None:
    """Returns the speed of large collectives over what the links of the plan allow: the median of the last three
    windows, without the first.
    """
    shares = history.series("bus_share")[1:]
    return median(shares[-_FEW:]) if len(shares) >= _FEW else None


def exposed_communication(history: History) -> float | None:
    """Returns by how much more of a step than planned the rank that waits least waits for collectives, as a share of
    the step: the median of the last ten windows, of which there must be three after the first.
    """
    planned, windows = history.facts.planned_comm_share, history.with_metric(_COMMUNICATION)[1:][-_MANY:]
    if planned is None or len(windows) < _FEW:
        return None
    shares = [float(min(window[_COMMUNICATION]) / window["step_s"]) for window in windows]
    return median(shares) - planned


def low_mfu(history: History) -> float | None:
    """Returns the MFU over that of the plan: the median of the last ten windows, after the first 20."""
    planned, shares = history.facts.planned_mfu, history.series("mfu")
    return median(shares[-10:]) / planned if planned and len(shares) > FEWEST else None


def checkpoint_time(history: History) -> float | None:
    """Returns the time of the newest checkpoint as a share of the time since the one before, or since the start."""
    return history.newest("checkpoint_share")


def slow_checkpoint(history: History) -> float | None:
    """Returns how much longer the newest checkpoint took than those before it, of which there must be two: the ratio to
    their median.
    """
    seconds = history.checkpoint_s
    return seconds[-1] / median(seconds[:-1]) if len(seconds) > 2 else None


def gpu_clock(history: History) -> float | None:
    """Returns the clock of the slowest GPU over the median of all: the median of the last three windows."""
    return _least_of_median(history, "gpu_clock_mhz_by_rank")


def gpu_power(history: History) -> float | None:
    """Returns the power of the GPU that draws least over the median of all: the median of the last three windows."""
    return _least_of_median(history, "gpu_power_w_by_rank")


def slowest_clock(history: History) -> int:
    """Returns the rank whose GPU has the lowest clock."""
    return _least(history.windows[-1]["gpu_clock_mhz_by_rank"])


def least_power(history: History) -> int:
    """Returns the rank whose GPU draws the least power."""
    return _least(history.windows[-1]["gpu_power_w_by_rank"])


def busy_at_low_power(history: History) -> float | None:
    """Returns the drawn share of the GPUs' power limits while they are at least 90 % busy: the median of the last ten
    windows.
    """
    busy = [window for window in history.windows if "gpu_power_share" in window][-10:]
    if len(busy) < 10 or median(float(window["gpu_utilization"]) for window in busy) < 0.9:
        return None
    return median(float(window["gpu_power_share"]) for window in busy)


def _least_of_median(history: History, name: str) -> float | None:
    lists = [values for window in history.windows if len(values := window.get(name) or []) > 1][-_FEW:]
    return median(min(values) / median(values) for values in lists) if len(lists) == _FEW else None


def _least(values: Sequence[float]) -> int:
    return list(values).index(min(values))
