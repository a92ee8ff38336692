"""What rules about loss, gradients and memory measure: one number of the history, or None (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from dstrain.monitor.health.history import FEWEST, FIRST, History, deviation

_SPIKE = 6.0
"""Deviations that make a spike. Source: OLMo-core's SkipStepOptimizer, 6 σ over 128 steps."""
_SHIFTED = 3
"""Windows that are all higher than before if the loss has not only a spike."""
_FIRST_STEPS = 20
"""Steps within which a first loss is logged."""
_PLATEAU_STEPS = 100
_PLATEAU_WINDOWS = 64
_EVEN_LOAD = 0.2
"""Deviation of the experts' load, over its mean, that counts as even: a rule of thumb of training guides."""
_USUAL_LOAD = 2.0
"""Load of the busiest expert, over the mean, that counts as usual."""
_FEW = 3
"""Windows whose median stands for now."""
_GROWTH = 1.01
"""Ratio to all earlier peaks of memory from which it counts as grown."""
_CLEAR_RISE = 0.05
"""Share by which one evaluation loss has to be above the best one to be no noise."""


def loss_spike(history: History) -> float | None:
    """Returns the deviations of the newest loss above its median if it is a fifth above, or those of the median of the
    last three if that is a twentieth above; otherwise 0.
    """
    losses = history.series("loss")
    spike = _spike(losses, least_ratio=1.2)
    if spike or len(losses) < FEWEST + _SHIFTED:
        return spike
    return _spike([*losses[:-_SHIFTED], median(losses[-_SHIFTED:])], least_ratio=1.05)


def repeated_spikes(history: History) -> float | None:
    """Returns how many of the last 50 losses are spikes."""
    losses = history.series("loss")
    if len(losses) <= FEWEST:
        return None
    middle = median(losses)
    return sum(loss > 1.2 * middle and deviation(loss, losses) > _SPIKE for loss in losses[-50:])


def divergence(history: History) -> float | None:
    """Returns the least ratio of the loss's moving average (50 steps) to its best, over the last 100 steps."""
    ratios = list(history.loss_ratios)
    if not ratios or ratios[-1][0] - ratios[0][0] < 100:
        return None
    first = ratios[-1][0] - 100
    return min(ratio for step, ratio in ratios if step >= first)


def zero_loss(history: History) -> float | None:
    """Returns how many of the last three losses are 0, or below 0.01 within the first 50 steps."""
    if not history.facts.is_cross_entropy:
        return None
    last = [(float(window["loss"]), int(window["step"])) for window in history.windows][-3:]
    return sum(loss == 0 or (step <= 50 and 0 <= loss < 0.01) for loss, step in last)


def first_loss(history: History) -> float | None:
    """Returns the first loss over ln(vocabulary), which is that of a model that guesses."""
    vocab, loss = history.facts.vocab_size, history.newest("loss")
    if not history.facts.is_cross_entropy:
        return None
    if history.num_windows != 1 or vocab is None or loss is None or history.windows[0]["step"] > _FIRST_STEPS:
        return None
    return loss / math.log(vocab)


def above_guessing(history: History) -> float | None:
    """Returns the newest loss over that of a model that guesses, ln(vocabulary), or over the first one if that is
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


def gradient_spike(history: History) -> float | None:
    """Returns the deviations of the newest gradient norm above its median; 0 if it is less than twice that."""
    return _spike(history.series("grad_norm"), least_ratio=2.0)


def repeated_gradient_spikes(history: History) -> float | None:
    """Returns how many of the last 20 gradient norms are above ten times the median."""
    norms = history.series("grad_norm")
    if len(norms) <= FEWEST:
        return None
    middle = median(norms)
    return sum(norm > 10 * middle for norm in norms[-20:])


def large_gradient(history: History) -> float | None:
    """Returns the newest gradient norm, after the first 20 windows."""
    return history.newest("grad_norm") if history.num_windows > FEWEST else None


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


def gpu_memory_growth(history: History) -> float | None:
    """Returns how many windows in a row, or threes of windows by their medians, up to the newest, had a peak more than
    1 % above all earlier ones.
    """
    return _records(history, "peak_bytes_per_gpu")


def host_memory_growth(history: History) -> float | None:
    """Returns how many windows in a row, or threes of windows by their medians, up to the newest, had over 1 % more
    resident memory than all earlier ones.
    """
    return _records(history, "host_bytes_max")


def grown_windows(history: History, name: str) -> int:
    """Returns how many newest windows have seen a metric grow, the one or three before included; 0: it has not."""
    single, threes = _growth(history, name) or (0, 0)
    return (single + 1 if single >= threes else _FEW * (threes + 1)) if single or threes else 0


def host_memory(history: History) -> float | None:
    """Returns the used share of the fullest node's RAM."""
    return history.newest("host_used_share")


def allocator_retries(history: History) -> float | None:
    """Returns how often the allocator flushed its cache in the newest window, for want of memory."""
    retries = history.series("alloc_retries")
    return retries[-1] - retries[-2] if len(retries) > 1 else None


def fragmentation(history: History) -> float | None:
    """Returns the memory that the allocator holds beyond the live peak, as a share of the GPU."""
    reserved, peak = history.newest("reserved_bytes_per_gpu"), history.newest("peak_bytes_per_gpu")
    if reserved is None or peak is None or not history.facts.device_bytes:
        return None
    return (reserved - peak) / history.facts.device_bytes


def uneven_experts(history: History) -> float | None:
    """Returns the deviation of the experts' load, the median of the last three windows, over that of the first 20."""
    loads = _experts(history, lambda window: float(window["expert_load_cv"]))
    return loads[1] / max(loads[0], _EVEN_LOAD) if loads and loads[0] else None


def busiest_expert(history: History) -> float | None:
    """Returns the load of the busiest expert over the mean of its layer, in the worst layer, the median of the last
    three windows, over that of the first 20, of which 2 are assumed at least.
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
    first, recent = history.first_loads, history.with_metric("expert_load_cv")[-_FEW:]
    if history.num_windows <= FEWEST or len(first) < FEWEST or len(recent) < _FEW:
        return None
    return median(map(of, first)), median(map(of, recent))


def memory_imbalance(history: History) -> float | None:
    """Returns how much the peak of one rank exceeds that of another, as a share of the lesser; after 20 windows."""
    peaks = history.peaks_by_rank
    if len(peaks) < 2 or len(history.with_metric("peak_bytes_by_rank")) <= FEWEST or not min(peaks):
        return None
    return max(peaks) / min(peaks) - 1


def skipped_steps(history: History) -> float | None:
    """Returns the steps among the last 100 that were skipped because gradients were not finite; after the first 50."""
    last = [window for window in history.since(100) if "skipped_steps" in window and window["step"] > 50]
    return float(last[-1]["skipped_steps"] - last[0]["skipped_steps"]) if last else None


def loss_scale(history: History) -> float | None:
    """Returns how often fp16's loss scale was halved since it last grew; after the first 50 steps."""
    scales = [
        float(window["loss_scale"]) for window in history.windows if window["step"] > 50 and "loss_scale" in window
    ]
    if not scales:
        return None
    since = max((index for index in range(1, len(scales)) if scales[index] > scales[index - 1]), default=0)
    return math.log2(scales[since] / scales[-1]) if scales[-1] > 0 else math.inf


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
    """Returns how much the first loss after a resume differs from that of the same steps before, as a share."""
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


def _records(history: History, name: str) -> float | None:
    """Counts windows in a row that were above all before, or threes of windows by their medians, if these are more: a
    slow growth hides in the noise of single windows. None count in the first `FEWEST` windows, as caches fill.
    """
    counts = _growth(history, name)
    return max(counts) if counts else None


def _growth(history: History, name: str) -> tuple[int, int] | None:
    """Returns how many windows, and how many threes of windows, have grown in a row; None in the first windows."""
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
