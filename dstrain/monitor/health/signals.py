"""What rules measure: each signal is one number of the history, or None where it says nothing yet (pure functions)."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from dstrain.monitor.health.history import FEWEST, History, deviation

_SPIKE = 6.0
"""Deviations that make a spike. Source: OLMo-core's SkipStepOptimizer, 6 σ over 128 steps."""
_RECENT_STEPS = 20
"""Steps that are compared with all earlier ones where speed is judged."""
_FEW = 3
"""Windows whose median stands for now."""


def loss_spike(history: History) -> float | None:
    """Returns the deviations of the newest loss above its median; 0 if it is less than a fifth above."""
    return _spike(history.series("loss"), least_ratio=1.2)


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
    if history.num_windows != 1 or vocab is None or loss is None or history.windows[0]["step"] > _RECENT_STEPS:
        return None
    return loss / math.log(vocab)


def overfitting(history: History) -> float | None:
    """Returns the newest evaluation loss over the best one, less 1, if the last two rose while the loss fell."""
    evals, losses = history.evaluations, history.series("loss")
    if len(evals) < 3 or len(losses) < FEWEST or not evals[-3] < evals[-2] < evals[-1]:
        return None
    half = len(losses) // 2
    falls = median(losses[half:]) < median(losses[:half])
    return evals[-1] / min(evals) - 1 if falls else 0.0


def gradient_spike(history: History) -> float | None:
    """Returns the deviations of the newest gradient norm above its median; 0 if it is less than twice that."""
    return _spike(history.series("grad_norm"), least_ratio=2.0)


def repeated_gradient_spikes(history: History) -> float | None:
    """Returns how many of the last 20 gradient norms are above ten times the median."""
    norms = history.series("grad_norm")
    if len(norms) <= FEWEST:
        return None
    return sum(norm > 10 * median(norms) for norm in norms[-20:])


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


def slowdown(history: History) -> float | None:
    """Returns how much longer steps take now, over the last 20, than before; per step or per token, whichever is less.

    A batch with more tokens takes longer, and one with fewer has fewer of them in a second.
    """
    windows = list(history.windows)[1:]  # the first compiles and allocates
    recent = [window for window in windows if window["step"] > windows[-1]["step"] - _RECENT_STEPS]
    recent = max(recent, windows[-_FEW:], key=len)
    earlier = windows[: -len(recent)] if recent else []
    if len(earlier) < FEWEST or not all("step_s" in window and window.get("tokens_per_s") for window in windows):
        return None

    def ratio(name: str) -> float:
        now, before = (median(float(window[name]) for window in part) for part in (recent, earlier))
        return now / before

    return min(ratio("step_s"), 1 / ratio("tokens_per_s"))


def data_wait(history: History) -> float | None:
    """Returns the share of time in which ranks wait for data: the median of the last three windows."""
    shares = history.series("data_wait_share")[1:]
    return median(shares[-_FEW:]) if len(shares) >= _FEW else None


def padding(history: History) -> float | None:
    """Returns the share of padding among all tokens: the median of the last ten windows."""
    shares = history.series("padding_share")
    return median(shares[-10:]) if len(shares) >= 5 else None


def gpu_memory_growth(history: History) -> float | None:
    """Returns how many of the last 12 windows had a peak more than 1 % above that of the window before."""
    return _growths(history.series("peak_bytes_per_gpu"))


def host_memory_growth(history: History) -> float | None:
    """Returns how many of the last 12 windows had more than 1 % more resident memory than the window before."""
    return _growths(history.series("host_bytes_max"))


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


def memory_imbalance(history: History) -> float | None:
    """Returns how much the peak of one rank exceeds that of another, as a share of the lesser; after 20 windows."""
    peaks = history.peaks_by_rank
    if len(peaks) < 2 or history.num_windows <= FEWEST or not min(peaks):
        return None
    return max(peaks) / min(peaks) - 1


def skipped_steps(history: History) -> float | None:
    """Returns the steps among the last 100 that were skipped because gradients were not finite; after the first 50."""
    last = [window for window in history.since(100) if "skipped_steps" in window and window["step"] > 50]
    return float(last[-1]["skipped_steps"] - last[0]["skipped_steps"]) if last else None


def _spike(values: list[float], *, least_ratio: float) -> float | None:
    if len(values) <= FEWEST:
        return None
    *earlier, newest = values
    return deviation(newest, earlier) if newest > least_ratio * median(earlier) else 0.0


def _growths(values: list[float]) -> float | None:
    last = values[-13:]
    if len(last) < 13:
        return None
    return sum(after > 1.01 * before for before, after in pairwise(last))
