"""Compares what a run measured with its plan: seconds, tokens, MFU, and bytes of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Protocol

from dstrain.choices import Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.monitor.windows import Line, counted, number, peaks_by_rank, series
from dstrain.plan.estimate_records import Estimate, Speed
from dstrain.plan.speed.step_time import INTER, INTRA

_NOTABLE = 0.01
"""Share of a step, or of a GPU's memory, from which the difference of a part is named."""


class Measured(Protocol):
    """A run: its plan, and what it measured so far."""

    @property
    def estimate(self) -> Estimate | None:
        """The prediction for this run."""

    @property
    def cluster(self) -> Cluster | None:
        """None also if its GPU was assumed."""

    @property
    def windows(self) -> Sequence[Line]:
        """Metrics of each logged window."""

    @property
    def states(self) -> Sequence[Mapping[str, int]]:
        """Measured bytes of model states, by rank."""


class Quantity(StrEnum):
    """What is compared."""

    STEP_S = "step_s"
    """Seconds of an optimizer step."""
    TOKENS = "tokens_per_s_per_gpu"
    MFU = "mfu"
    COMM = "comm_s"
    """Seconds of a step in which ranks wait for collectives: the mean of the ranks."""
    BUS = "bus_bytes_per_s"
    """Bus bandwidth of large collectives."""
    PEAK = "peak_bytes_per_gpu"
    """Peak of live tensors."""
    RESERVED = "reserved_bytes_per_gpu"
    """Peak of what PyTorch's allocator held."""
    STATES = "states_bytes_per_gpu"
    """Model states on the GPU."""
    HOST = "states_host_bytes_per_rank"
    """Offloaded model states."""


class Part(StrEnum):
    """A part of a step's time or of a GPU's memory."""

    DATA_WAIT = "waiting for data"
    TRAINING = "computation and communication"
    """Both, where collectives were not measured."""
    COMPUTATION = "computation"
    """The optimizer and copies to the host included."""
    HOST = "waiting for the host"
    """On a GPU, forward passes at the pace of launches; on a CPU, time without a core (`meter.Meter`)."""
    OTHER = "between steps"
    """Callbacks and logging; checkpoints and evaluations are not in a step."""
    COMMUNICATION = "exposed communication"
    """Waiting for collectives, of the rank that waits least: no rank is late there."""
    SLOWER_RANKS = "waiting for slower ranks"
    """What the ranks wait longer than that, on average."""
    PARAMS = "parameters"
    GRADS = "gradients"
    OPTIMIZER = "optimizer states"
    TRANSIENT = "activations, logits and buffers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A quantity, planned and measured."""

    quantity: Quantity
    planned: float | None
    """None if the plan does not say."""
    measured: float | None
    """The median of the windows for speeds, the largest of all ranks for bytes; None if it was not measured."""
    ranks: tuple[float, ...] = ()
    """What each rank measured."""
    uncertainty: float | None = None
    """The share by which the plan may be off, for 8 of 10 runs."""

    @property
    def off(self) -> float | None:
        """How much the measurement is above the plan, as a share of the plan."""
        return self.measured / self.planned - 1 if self.planned and self.measured is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The part that differs most from the plan."""

    part: Part
    planned: float
    """Seconds of a step, or bytes per GPU."""
    measured: float
    share: float
    """The difference as a share of the planned total."""

    @property
    def is_time(self) -> bool:
        """Whether it is a part of a step's time."""
        return self.part not in _OF_MEMORY


_OF_MEMORY = frozenset({Part.PARAMS, Part.GRADS, Part.OPTIMIZER, Part.TRANSIENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A part of a step's time."""

    part: Part
    planned: float | None
    """Seconds; None if no time is planned."""
    measured: float


def planned_speed(run: Measured) -> Speed | None:
    """Returns the times of the plan of a run; None if it has none for what the run trained on."""
    estimate, cluster = run.estimate, run.cluster
    return estimate.speed if estimate is not None and cluster is not None and not cluster.gpu.is_cpu else None


def middle(windows: Sequence[Line], name: str) -> float | None:
    """Returns the median of a metric over the windows that count; None if none has it.

    >>> middle([{"step": 1, "x": 9}, {"step": 2, "x": 1}, {"step": 3, "x": 3}], "x")
    2.0
    """
    values = [value for _, value in series(counted(windows).windows, name)]
    return median(values) if values else None


def comparisons(run: Measured) -> tuple[Comparison, ...]:
    """Returns every quantity that was planned or measured."""
    every = (*_speeds(run), *_memory(run))
    return tuple(each for each in every if each.planned is not None or each.measured is not None)


def _speeds(run: Measured) -> Iterator[Comparison]:
    windows, speed = run.windows, planned_speed(run)
    spread = speed.uncertainty_ratio if speed is not None else None
    for quantity, planned in (
        (Quantity.STEP_S, speed.step_s if speed else None),
        (Quantity.TOKENS, speed.tokens_per_s_per_gpu if speed else None),
        (Quantity.MFU, speed.mfu_ratio if speed else None),
    ):
        measured = middle(windows, quantity.value)
        yield Comparison(quantity=quantity, planned=planned, measured=measured, uncertainty=spread)
    exposed, bus = (middle(windows, quantity.value) for quantity in (Quantity.COMM, Quantity.BUS))
    if exposed is not None:
        yield Comparison(quantity=Quantity.COMM, planned=communication_s(speed) if speed else None, measured=exposed)
    if bus is not None:
        share = middle(windows, "bus_share")
        yield Comparison(quantity=Quantity.BUS, planned=bus / share if share else None, measured=bus)


def communication_s(speed: Speed) -> float:
    """Returns the planned seconds of a step in which computation waits for links."""
    return sum(speed.parts_s.get(part, 0.0) for part in (INTRA, INTER))


def step_parts(run: Measured) -> tuple[StepPart, ...]:
    """Returns the parts of a step, which sum to it; empty if no step was measured.

    A rank that waits for data makes the others wait for it: that time counts once, as waiting for data.
    """
    windows, speed = run.windows, planned_speed(run)
    step_s, waited = middle(windows, "step_s"), middle(windows, "data_wait_share")
    if step_s is None:
        return ()
    waits = (waited or 0.0) * step_s
    parts: list[tuple[Part, float | None, float]] = [(Part.DATA_WAIT, 0.0, waits)]
    rows = [
        (min(exposed), max(0.0, sum(exposed) / len(exposed) - min(exposed) - _uneven(window)))
        for window in counted(windows).windows
        if (exposed := _of_ranks(window, "comm_s_by_rank"))
    ]
    name, rest = Part.TRAINING, speed.step_s if speed else None
    if rows:
        least, late = (median(column) for column in zip(*rows, strict=True))
        planned = communication_s(speed) if speed else None
        parts.append((Part.COMMUNICATION, planned, least))
        parts.append((Part.SLOWER_RANKS, 0.0, late))
        name, rest = Part.COMPUTATION, speed.step_s - (planned or 0.0) if speed else None
    left = max(0.0, step_s - sum(seconds for _, _, seconds in parts))
    for part, metric in ((Part.OTHER, "other_s_by_rank"), (Part.HOST, "host_s_by_rank")):
        if seconds := min(left, median(_of_last_rank(window, metric) for window in counted(windows).windows)):
            parts.append((part, 0.0, seconds))
            left -= seconds
    parts.append((name, rest, left))
    return tuple(StepPart(part=part, planned=before if speed else None, measured=now) for part, before, now in parts)


def _of_last_rank(window: Line, name: str) -> float:
    """Returns a metric of the rank that enters collectives last, for which the others wait; 0 if it is unknown."""
    values, waits = _of_ranks(window, name), _of_ranks(window, "comm_s_by_rank")
    return values[waits.index(min(waits))] if len(waits) == len(values) > 0 else max(values, default=0.0)


def _of_ranks(window: Line, name: str) -> list[float]:
    """Returns a metric of each rank; empty unless all are known."""
    values = window.get(name)
    numbers = [number(value) for value in values] if isinstance(values, list) else []
    return [value for value in numbers if value is not None] if None not in numbers else []


def _uneven(window: Line) -> float:
    """Returns by how many seconds of a step the rank that waits longest for data exceeds the mean."""
    waits = _of_ranks(window, "data_wait_s_by_rank")
    return max(waits) - sum(waits) / len(waits) if waits else 0.0


def _memory(run: Measured) -> Iterator[Comparison]:
    windows, estimate = run.windows, run.estimate
    memory = estimate.memory if estimate is not None else None
    on_gpu = run.cluster is not None and not run.cluster.gpu.is_cpu
    peaks, reserved = peaks_by_rank(run.windows), [value for _, value in series(windows, Quantity.RESERVED.value)]
    yield Comparison(
        quantity=Quantity.PEAK,
        planned=memory.live_bytes_per_gpu if memory and (on_gpu or peaks) else None,
        measured=max(peaks, default=None),
        ranks=peaks,
    )
    yield Comparison(
        quantity=Quantity.RESERVED,
        planned=memory.reserved_bytes_per_gpu if memory and (on_gpu or reserved) else None,
        measured=max(reserved, default=None),
    )
    held = tuple(rank["params"] + rank["grads"] + rank["optimizer"] for rank in run.states)
    yield Comparison(
        quantity=Quantity.STATES,
        planned=memory.states.device if memory else None,
        measured=max(held, default=None),
        ranks=held,
    )
    if estimate is not None and estimate.configuration.zero.offload is not Offload.NONE:
        offloaded = tuple(rank["host"] for rank in run.states)
        planned, measured = estimate.memory.states.host, max(offloaded, default=None)
        yield Comparison(quantity=Quantity.HOST, planned=planned, measured=measured, ranks=offloaded)


def largest_difference(run: Measured) -> Difference | None:
    """Returns the part of time or memory that differs most from the plan, relative to the whole; None if nothing can be
    compared, or if nothing differs by more than 1 %."""
    worst = max(differences(run), key=lambda each: abs(each.share), default=None)
    return worst if worst is not None and abs(worst.share) >= _NOTABLE else None


def differences(run: Measured) -> list[Difference]:
    """Returns the difference of each part that can be compared."""
    return [*_time_differences(run), *_memory_differences(run)]


def _time_differences(run: Measured) -> Iterator[Difference]:
    speed = planned_speed(run)
    if speed is None:
        return
    whole = max(speed.step_s, 1e-9)
    for one in step_parts(run):
        if one.planned is not None:
            share = (one.measured - one.planned) / whole
            yield Difference(part=one.part, planned=one.planned, measured=one.measured, share=share)


def _memory_differences(run: Measured) -> Iterator[Difference]:
    """Yields the parts of the fullest rank."""
    estimate, ranks = run.estimate, run.states
    if estimate is None or not ranks:
        return
    memory, states = estimate.memory, estimate.memory.states
    total = max(memory.live_bytes_per_gpu, 1)
    for part, name in ((Part.PARAMS, "params"), (Part.GRADS, "grads"), (Part.OPTIMIZER, "optimizer")):
        before, after = getattr(states, name), max(rank[name] for rank in ranks)
        yield Difference(part=part, planned=before, measured=after, share=(after - before) / total)
    peaks = peaks_by_rank(run.windows)
    if peaks and len(peaks) == len(ranks):
        rest = memory.live_bytes_per_gpu - states.device
        most = max(
            peak - rank["params"] - rank["grads"] - rank["optimizer"] for peak, rank in zip(peaks, ranks, strict=True)
        )
        yield Difference(part=Part.TRANSIENT, planned=rest, measured=most, share=(most - rest) / total)
