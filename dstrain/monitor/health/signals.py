"""The signals of health rules: one number of the history each, None if it says nothing yet; and outlooks (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Any

from dstrain.monitor.health.history import FEWEST, FIRST, History, deviation
from dstrain.units import format_bytes, format_seconds

_SHIFTED = 3
"""Windows that are all higher than before if the loss has not only a spike."""
_FIRST_STEPS = 20
"""Steps within which a first loss is logged."""
_PLATEAU_STEPS = 100
_PLATEAU_WINDOWS = 64
_USUAL_LOAD = 2.0
"""Load of the busiest expert, over the mean, that counts as usual."""
_FEW, _MANY = 3, 10
"""Windows that stand for now: if a change is large, and if it is small."""
_GROWTH = 1.01
"""Ratio to all earlier peaks of memory from which it counts as grown."""
MEMORIES = (GPU_PEAK, RAM) = ("peak_bytes_per_gpu", "host_bytes_max")
"""Metrics of memory that may grow."""
_CLEAR_RISE = 0.05
"""Share by which one evaluation loss has to be above the best one to be no noise."""
_RECENT_STEPS = 20
"""Steps that are compared with all earlier ones where speed is judged."""
_LASTING_STEPS = 50
_MUCH_SLOWER = 1.34
"""Ratio that is told at once. Source: Greyhound: slow phases cost 1.34 times the time on average."""
_STRAGGLER = 0.33
"""Lag of a rank that is clear at once. Source: NVRx: 0.75 of the fastest one's speed."""
_LEAST_NOISE = 0.02
"""Deviation of a rank's lag that is assumed at least."""
_PER_PASS, _PER_TOKEN = "forward_s_by_rank", "forward_s_per_token_by_rank"
_OWN, _QUEUED = "own_s_by_rank", "queued_s_by_rank"


def loss_spike(history: History) -> float | None:
    """Returns the deviations of the newest loss above its median if it is a fifth above, or of the last three losses'
    median if that is a twentieth above; otherwise 0.
    """
    losses = history.series("loss")
    spike = _spike(losses, least_ratio=1.2)
    if spike or len(losses) < FEWEST + _SHIFTED:
        return spike
    return _spike([*losses[:-_SHIFTED], median(losses[-_SHIFTED:])], least_ratio=1.05)


def zero_loss(history: History) -> float | None:
    """Returns how many of the last three losses are 0, or below 0.01 within the first 50 steps."""
    if not history.facts.is_cross_entropy:
        return None
    last = [(float(window["loss"]), int(window["step"])) for window in history.windows][-3:]
    return sum(loss == 0 or (step <= 50 and 0 <= loss < 0.01) for loss, step in last)


def first_loss(history: History) -> float | None:
    """Returns the first loss over ln(vocabulary), the loss of a model that guesses."""
    vocab, loss = history.facts.vocab_size, history.newest("loss")
    if not history.facts.is_cross_entropy:
        return None
    if history.num_windows != 1 or vocab is None or loss is None or history.windows[0]["step"] > _FIRST_STEPS:
        return None
    return loss / math.log(vocab)


def above_guessing(history: History) -> float | None:
    """Returns the newest loss over a guessing model's, ln(vocabulary), or over the first one if that is
    larger; after the first window."""
    vocab, loss = history.facts.vocab_size, history.newest("loss")
    if not history.facts.is_cross_entropy or history.num_windows < 2 or vocab is None or loss is None:
        return None
    return loss / max(math.log(vocab), *history.first_losses[:1])


def overfitting(history: History) -> float | None:
    """Returns the newest evaluation loss over the best one, less 1, if the last two rose, or the last one by a
    twentieth over the best, while the loss fell.
    """
    evals, losses = history.evaluations, history.series("loss")
    if len(evals) < 2 or len(losses) < _FEW or not evals[-2] < evals[-1]:
        return None
    rise = evals[-1] / min(evals) - 1
    if rise < _CLEAR_RISE and (len(evals) < 3 or not evals[-3] < evals[-2]):
        return None
    half = len(losses) // 2
    return rise if median(losses[half:]) < median(losses[:half]) else 0.0


def clipped_share(history: History) -> float | None:
    """Returns the share of the last 100 steps' windows whose gradient norm is above `max_grad_norm`."""
    limit, last = history.facts.max_grad_norm, history.since(100)
    norms = [float(window["grad_norm"]) for window in last if isinstance(window.get("grad_norm"), float)]
    if not limit or not norms:
        return None
    return sum(norm > limit for norm in norms) / len(norms)


def vanished_gradient(history: History) -> float | None:
    """Returns the newest gradient norm over the median of the first 20."""
    norm, first = history.newest("grad_norm"), history.first_norms
    if norm is None or len(first) < FEWEST or history.num_windows <= FEWEST or not median(first):
        return None
    return norm / median(first)


def memory_growth(history: History) -> float | None:
    """Returns how many windows in a row, or threes of windows by their medians, up to the newest, had over 1 % more
    than all earlier ones: the peak of the fullest GPU, or the RAM of the fullest rank, whichever grew longer.
    """
    grown = [max(counts) for name in MEMORIES if (counts := _growth(history, name)) is not None]
    return max(grown, default=None)


def grown_windows(history: History, name: str) -> int:
    """Returns how many newest windows have seen a metric grow, the one or three before included; 0: it has not."""
    single, threes = _growth(history, name) or (0, 0)
    return (single + 1 if single >= threes else _FEW * (threes + 1)) if single or threes else 0


def busiest_expert(history: History) -> float | None:
    """Returns the load of the busiest expert over the mean of its layer, in the worst layer, the median of the last
    three windows, over the first 20, of which 2 are assumed at least.
    """
    loads = _experts(history, lambda window: float(window["expert_load_max_over_mean"]))
    return loads[1] / max(loads[0], _USUAL_LOAD) if loads else None


def dead_experts(history: History) -> float | None:
    """Returns the share of experts without a token, the median of the last three windows, less the largest one of the
    first 20."""
    dead = _experts(history, _dead_share)
    return dead[1] - max(map(_dead_share, history.first_loads)) if dead else None


def _dead_share(window: Mapping[str, Any]) -> float:
    return float(window["dead_experts"] / window["experts"])


def _experts(history: History, of: Callable[[Mapping[str, Any]], float]) -> tuple[float, float] | None:
    """Returns the median of a figure of experts in the first 20 windows, and that in the last three; None before."""
    first, recent = history.first_loads, history.with_metric("dead_experts")[-_FEW:]
    if history.num_windows <= FEWEST or len(first) < FEWEST or len(recent) < _FEW:
        return None
    return median(map(of, first)), median(map(of, recent))


def skipped_steps(history: History) -> float | None:
    """Returns the steps among the last 100 that were skipped because gradients were not finite; after the first 50."""
    last = [window for window in history.since(100) if "skipped_steps" in window and window["step"] > 50]
    return float(last[-1]["skipped_steps"] - last[0]["skipped_steps"]) if last else None


def plateau(history: History) -> float | None:
    """Returns the most by which the loss may have fallen since the start, as a share: its second half is compared with
    its first one, and two standard errors of the difference are added; within the first 512 windows, after 100 steps
    and 64 windows near the peak of the learning rate, and never once the loss has clearly fallen.
    """
    rates = history.series("learning_rate")
    learning = sum(rate >= max(rates) / 2 > 0 for rate in rates)
    is_late = history.num_windows > FIRST or history.has_fallen
    if is_late or learning < _PLATEAU_WINDOWS or history.windows[-1]["step"] < _PLATEAU_STEPS:
        return None
    fall, error = history.fall
    return fall + 2 * error


def resumed_loss(history: History) -> float | None:
    """Returns how much the first loss after a resume differs from the loss of the same steps before, as a share."""
    before, loss = history.replayed_loss, history.newest("loss")
    return None if before is None or loss is None or before <= 0 else abs(loss / before - 1)


def masked_samples(history: History) -> float | None:
    """Returns the share of samples without any label: the mean of the last three windows."""
    shares = history.series("masked_share")[-3:]
    return fmean(shares) if shares else None


def _spike(values: list[float], *, least_ratio: float) -> float | None:
    if len(values) <= FEWEST:
        return None
    *earlier, newest = values
    return deviation(newest, earlier) if newest > least_ratio * median(earlier) else 0.0


def _growth(history: History, name: str) -> tuple[int, int] | None:
    """Returns how many windows, and how many threes of windows, have grown in a row: a slow growth hides in the noise
    of single windows. None in the first `FEWEST` windows, as caches fill.
    """
    values = history.series(name)
    if len(values) <= FEWEST:
        return None
    medians = [median(values[index : index + _FEW]) for index in range(len(values) - _FEW + 1)]
    return _in_a_row(values, every=1), _in_a_row(medians, every=_FEW)


def _in_a_row(values: Sequence[float], *, every: int) -> int:
    """Counts the values, each of so many, up to the newest, that exceed all before by more than `_GROWTH`."""
    count = 0
    for index in range(len(values) - 1, FEWEST - 1, -every):
        if values[index] <= _GROWTH * max(values[: index - every + 1]):
            break
        count += 1
    return count


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
    """Returns how much longer the slowest rank works than the fastest, as a share: in whole steps, in which it enters
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

    On a CPU, a rank works between all that it did not wait, and that without the time in which it had no core: its
    own work is what both have in common.
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


def bus_bandwidth(history: History) -> float | None:
    """Returns the speed of large collectives over what the links of the plan allow: the median of the last three
    windows, without the first.
    """
    shares = history.series("bus_share")[1:]
    return median(shares[-_FEW:]) if len(shares) >= _FEW else None


def slow_checkpoint(history: History) -> float | None:
    """Returns how much longer the newest checkpoint took than those before it, of which there must be two: the ratio to
    their median.
    """
    seconds = history.checkpoint_s
    return seconds[-1] / median(seconds[:-1]) if len(seconds) > 2 else None


def packing_gain(_history: History, share: float) -> str:
    """Returns the gain of rows without padding: at most 1/(1 - share) times the tokens, `share` of which are padding.

    That holds if every position of a row takes the same time.
    """
    return f"without it, the same time would train up to {1 / max(1 - share, 0.01):.1f} × the tokens"


def memory_pace(history: History, _records: float) -> str:
    """Returns how fast the memory grows that grew longest, and when it is full at that pace."""
    windows = {name: grown_windows(history, name) for name in MEMORIES}
    name = max(windows, key=windows.__getitem__)
    pace = _pace(history, name, windows[name])
    if pace is None:
        return ""
    if name == GPU_PEAK:
        left = _gpu_left(history, pace)
        return f"the GPU's peak grows by {format_bytes(pace)} a step{_until(history, 'the GPU', left)}"
    left = _host_left(history, pace, windows[name])
    return f"a rank's RAM grows by {format_bytes(pace)} a step{_until(history, 'the RAM of its node', left)}"


def _gpu_left(history: History, pace: float) -> float | None:
    """Returns the steps until the fullest GPU is full; None if they are unknown.

    Free is what neither the peak nor other owners (CUDA contexts, NCCL) have. Fragments of the allocator are left out,
    so that memory may end earlier.
    """
    peak, total = history.newest(GPU_PEAK), history.facts.device_bytes
    if total is None or peak is None:
        return None
    outside = max(history.windows[-1].get("outside_bytes_by_rank") or [0.0])
    return float(max(0.0, total - outside - peak) / pace)


def _host_left(history: History, pace: float, windows: int) -> float | None:
    """Returns the steps until the fullest node's RAM is full; None if they are unknown.

    The pace is the rank's, or the one of all processes of the node, such as other ranks and data workers, if that is
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
