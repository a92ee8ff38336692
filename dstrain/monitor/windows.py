"""Reads the measurements of a run from lines of `metrics.jsonl` (pure): its windows, which of them count, seconds of
a step, memory of each rank. Anything that is no number is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from dstrain.records import type_config

Line = Mapping[str, Any]
VERDICT = "verdict"
"""The `event` of the line of `metrics.jsonl` that compares the first steps with the plan."""
START = "start_step"
"""Key of the step from which the start of a window's run began; 0: from the beginning."""
WARM_UP_RATIO = 1.1
"""How much longer than later steps the steps of a window take while they warm up, at least."""
WARM_UP_STEPS = 100
"""Steps of a start after which warm-up is over: later slowness has another reason."""
_LOOKED_AT = 300
"""Windows of a start that are compared with each other."""
_STATES = ("params", "grads", "optimizer", "host")


def number(value: object) -> float | None:
    """Returns a number of a JSON file; None for anything else.

    >>> number(3), number(None), number(True)
    (3.0, None, None)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def series(windows: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """Returns step and value of a metric in each window that has it.

    >>> series([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], "loss")
    [(1, 2.0)]
    """
    values = ((window["step"], number(window.get(name))) for window in windows)
    return [(step, value) for step, value in values if value is not None]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rows and tokens of all logged steps of a run."""

    tokens: int
    """Tokens of all ranks, without padding."""
    seconds: float
    """Seconds of the steps, without evaluations and checkpoints."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the time in which they were trained."""
        return self.tokens / self.seconds


def throughput(windows: Sequence[Line]) -> Throughput | None:
    """Returns the tokens of all windows and the time of their steps, warm-up included; None without a window.

    >>> throughput([{"step": 9, "tokens": 30, "tokens_per_s": 10.0}, {"step": 12, "tokens": 20, "tokens_per_s": 20.0}])
    Throughput(tokens=50, seconds=4.0)
    """
    pairs = [(number(window.get("tokens")), number(window.get("tokens_per_s"))) for window in windows]
    timed = [(tokens, rate) for tokens, rate in pairs if tokens and rate]
    if not timed:
        return None
    return Throughput(round(sum(tokens for tokens, _ in timed)), sum(tokens / rate for tokens, rate in timed))


@dataclass(frozen=True, slots=True)
class Settled:
    """The windows of a run whose time counts."""

    windows: tuple[Line, ...]
    """Those after the warm-up of each start."""
    warm_up_steps: int
    """Steps of the others: kernels are loaded or compiled, memory is allocated, caches fill."""

    @property
    def note(self) -> str:
        """Omitted parts, in words; empty if nothing is omitted."""
        words = "step that warms up" if self.warm_up_steps == 1 else "steps that warm up"
        doubt = "; the last may warm up, too" if len(self.windows) == 1 else ""
        return f"without {self.warm_up_steps:,} {words}{doubt}" if self.warm_up_steps else ""


def settled(windows: Sequence[Line]) -> Settled:
    """Returns the windows whose time counts.

    The first window of a start warms up, and so do those that follow while their steps and tokens take a tenth longer
    than later ones: than the median of all later windows, or of the last third of the first 300, whichever is faster.
    A single window moves neither, and the last third has settled even if most of a short run warms up. After 100 steps
    nothing warms up. One H200, which loads kernels for each new number of targets (Qwen3-1.7B, samples attended one by
    one):

    >>> times = [3.54, 3.78, 2.47, 1.97, 2.10, 2.11, 2.10]
    >>> found = settled([{"step": 4 * n, "step_s": s, "tokens_per_s": 32e3 / s} for n, s in enumerate(times, 1)])
    >>> [window["step_s"] for window in found.windows], found.note
    ([1.97, 2.1, 2.11, 2.1], 'without 12 steps that warm up')
    """
    kept: list[Line] = []
    warm_up_steps = 0
    for began, group in groupby(windows, key=lambda window: int(window.get(START) or 0)):
        of_start = list(group)
        count = _warming(of_start, began)
        kept += of_start[count:]
        warm_up_steps += max(0, int(of_start[count - 1]["step"]) - began)
    return Settled(tuple(kept), warm_up_steps)


def counted(windows: Sequence[Line]) -> Settled:
    """Returns the windows whose time counts; all of them if there are no others than those that warm up."""
    steady = settled(windows)
    return steady if steady.windows else Settled(tuple(windows), 0)


def _warming(windows: Sequence[Line], began: int) -> int:
    """Returns how many of the first windows of a start warm up."""
    windows = windows[:_LOOKED_AT]
    for index in range(1, len(windows) - 1):
        parts = (windows[index + 1 :], windows[-max(1, len(windows) // 3) :])
        if windows[index]["step"] - began > WARM_UP_STEPS or not _is_slower(windows[index], parts):
            return index
    return max(1, len(windows) - 1)


def _is_slower(window: Line, parts: Iterable[Sequence[Line]]) -> bool:
    """Returns whether a step and a token take longer in a window than in the fastest part by its median."""
    for time in (_step_s, _token_s):
        own, medians = time(window), [_middle(part, time) for part in parts]
        if own is None or own <= WARM_UP_RATIO * min((value for value in medians if value is not None), default=own):
            return False
    return True


def _middle(windows: Sequence[Line], time: Callable[[Line], float | None]) -> float | None:
    values = [value for window in windows if (value := time(window)) is not None]
    return median(values) if values else None


def _step_s(window: Line) -> float | None:
    return number(window.get("step_s"))


def _token_s(window: Line) -> float | None:
    """Returns the seconds of a token, padding included."""
    rate = number(window.get("tokens_per_s"))
    return (1 - (number(window.get("padding_share")) or 0.0)) / rate if rate else None


def of_ranks(window: Line, name: str) -> list[float]:
    """Returns a metric of each rank; empty unless all are known."""
    values = window.get(name)
    numbers = [number(value) for value in values] if isinstance(values, list) else []
    return [value for value in numbers if value is not None] if None not in numbers else []


def by_rank(windows: Sequence[Line], name: str) -> list[tuple[float, ...]]:
    """Returns the values of a metric of each rank, from the windows that know all ranks; empty if none does.

    >>> by_rank([{"peak_bytes_by_rank": [5, 6]}, {"peak_bytes_by_rank": [7, 6]}], "peak_bytes_by_rank")
    [(5.0, 7.0), (6.0, 6.0)]
    """
    known = [values for window in windows if (values := of_ranks(window, name))]
    return list(zip(*(values for values in known if len(values) == len(known[-1])), strict=True))


def peaks_by_rank(windows: Sequence[Line]) -> tuple[float, ...]:
    """Returns the largest peak of each rank over all windows; empty if it was not measured, as on a CPU."""
    return tuple(map(max, by_rank(windows, "peak_bytes_by_rank")))


def states_by_rank(data: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
    """Returns the measured bytes of model states of each rank, from `states.json`; empty unless all are known."""
    ranks = data.get("ranks")
    if not isinstance(ranks, list):
        return ()
    whole = [rank for rank in ranks if isinstance(rank, dict) and all(isinstance(rank.get(k), int) for k in _STATES)]
    return tuple(whole) if len(whole) == len(ranks) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """Measurements of one rank; None if a CPU has none."""

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
    """Measurements of a run. The time of windows that warm up does not count (`windows.settled`), their memory does."""

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
    """Returns the measurements of the logged steps of a run.

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
        # memory and tokens count from the first window on: warming up changes times alone
        tokens_per_step=max((float(line["tokens"]) / _kept(line) / _steps(line) for line in windows), default=0.0),
        data_wait_share=median(shares) if shares else 0.0,
        alloc_retries=retries[-1] - retries[0] if retries else 0.0,
        ranks=_ranks(windows),
        warm_up_steps=steady.warm_up_steps,
    )


NOISE = 2.0
"""Standard errors by which medians must differ to be called different: 19 of 20 equal ones do not."""


def is_slower(one: Measurement, other: Measurement) -> bool:
    """Returns whether a run's median step is slower than another's by more than the scatter within both.

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
    """Returns the steps of a window: its seconds over a step's."""
    return max(1.0, float(line["tokens"]) / float(line["tokens_per_s"]) / float(line["step_s"]))


def _error_ratio(times: Sequence[float]) -> float:
    """Returns the standard error of the median of these times, over it, from their median absolute deviation."""
    if len(times) < 2:
        return 0.0
    middle = median(times)
    return 1.2533 * 1.4826 * median(abs(time - middle) for time in times) / middle / math.sqrt(len(times))


def _ranks(windows: Sequence[Line]) -> tuple[RankMeasurement, ...]:
    memory = [list(map(max, by_rank(windows, f"{name}_by_rank"))) for name in _MEMORY]
    return tuple(
        RankMeasurement(
            **{
                name: round(of_all[rank]) if rank < len(of_all) else None
                for name, of_all in zip(_MEMORY, memory, strict=True)
            },
            data_wait_s=median(waits),
        )
        for rank, waits in enumerate(by_rank(windows, "data_wait_s_by_rank"))
    )


_MEMORY = ("peak_bytes", "reserved_bytes", "outside_bytes")
"""Measurements of a rank of which the largest counts."""
