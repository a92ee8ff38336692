"""Compares the measurements of a run with its plan in figures and words: seconds, tokens, MFU, bytes of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from dstrain.choices import Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.monitor.run_record import RunRecord
from dstrain.monitor.windows import Line, counted, of_ranks, peaks_by_rank, series
from dstrain.plan.estimate_records import Speed
from dstrain.plan.speed.step_time import INTER, INTRA
from dstrain.units import format_bytes, format_rate, format_seconds
from dstrain.wrapping import aligned

_NOTABLE = 0.01
"""Share of a step, or of a GPU's memory, from which the difference of a part is named."""


class Quantity(StrEnum):
    """A figure that is compared."""

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
    """How much longer the ranks wait, on average."""
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
    """The measurement of each rank."""
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


def planned_speed(run: RunRecord) -> Speed | None:
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


def comparisons(run: RunRecord) -> tuple[Comparison, ...]:
    """Returns every quantity that was planned or measured."""
    every = (*_speeds(run), *_memory(run))
    return tuple(each for each in every if each.planned is not None or each.measured is not None)


def _speeds(run: RunRecord) -> Iterator[Comparison]:
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


def step_parts(run: RunRecord) -> tuple[StepPart, ...]:
    """Returns the parts of a step, which sum to it; empty if no step was measured.

    A rank that waits for data makes the others wait for it: that time counts once, as waiting for data.
    """
    windows, speed = run.windows, planned_speed(run)
    step_s, waited = middle(windows, "step_s"), middle(windows, "data_wait_share")
    if step_s is None:
        return ()
    waits = (waited or 0.0) * step_s
    parts: list[tuple[Part, float | None, float]] = [(Part.DATA_WAIT, 0.0, waits)]
    # the rank that waits least entered last, so that its wait is the transfer; the longer waits of the others are
    # lateness, except what is due to uneven waiting for data, which counts as that
    rows = [
        (min(exposed), max(0.0, sum(exposed) / len(exposed) - min(exposed) - _uneven(window)))
        for window in counted(windows).windows
        if (exposed := of_ranks(window, "comm_s_by_rank"))
    ]
    name, rest = Part.TRAINING, speed.step_s if speed else None
    if rows:
        least, late = (median(column) for column in zip(*rows, strict=True))
        planned = communication_s(speed) if speed else None
        parts.append((Part.COMMUNICATION, planned, least))
        parts.append((Part.SLOWER_RANKS, 0.0, late))
        name, rest = Part.COMPUTATION, speed.step_s - (planned or 0.0) if speed else None
    left = max(0.0, step_s - sum(seconds for _, _, seconds in parts))
    # one rank's clock against medians of all ranks: together they must not exceed the step
    for part, metric in ((Part.OTHER, "other_s_by_rank"), (Part.HOST, "host_s_by_rank")):
        if seconds := min(left, median(_of_last_rank(window, metric) for window in counted(windows).windows)):
            parts.append((part, 0.0, seconds))
            left -= seconds
    parts.append((name, rest, left))
    return tuple(StepPart(part=part, planned=before if speed else None, measured=now) for part, before, now in parts)


def _of_last_rank(window: Line, name: str) -> float:
    """Returns a metric of the rank that enters collectives last, for which the others wait; 0 if it is unknown."""
    values, waits = of_ranks(window, name), of_ranks(window, "comm_s_by_rank")
    return values[waits.index(min(waits))] if len(waits) == len(values) > 0 else max(values, default=0.0)


def _uneven(window: Line) -> float:
    """Returns by how many seconds of a step the rank that waits longest for data exceeds the mean."""
    waits = of_ranks(window, "data_wait_s_by_rank")
    return max(waits) - sum(waits) / len(waits) if waits else 0.0


def _memory(run: RunRecord) -> Iterator[Comparison]:
    windows, estimate = run.windows, run.estimate
    memory = estimate.memory if estimate is not None else None
    on_gpu = run.cluster is not None and not run.cluster.gpu.is_cpu
    peaks, reserved = peaks_by_rank(run.windows), [value for _, value in series(windows, Quantity.RESERVED.value)]
    yield Comparison(
        quantity=Quantity.PEAK,
        # nothing measures a peak on a CPU, so that its plan would stand alone
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


def largest_difference(run: RunRecord) -> Difference | None:
    """Returns the part of time or memory that differs most from the plan, relative to the whole; None if nothing can be
    compared, or if nothing differs by more than 1 %."""
    worst = max(differences(run), key=lambda each: abs(each.share), default=None)
    return worst if worst is not None and abs(worst.share) >= _NOTABLE else None


def differences(run: RunRecord) -> list[Difference]:
    """Returns the difference of each part that can be compared."""
    return [*_time_differences(run), *_memory_differences(run)]


def _time_differences(run: RunRecord) -> Iterator[Difference]:
    speed = planned_speed(run)
    if speed is None:
        return
    whole = max(speed.step_s, 1e-9)
    for one in step_parts(run):
        if one.planned is not None:
            share = (one.measured - one.planned) / whole
            yield Difference(part=one.part, planned=one.planned, measured=one.measured, share=share)


def _memory_differences(run: RunRecord) -> Iterator[Difference]:
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


NAMES = {
    Quantity.STEP_S: "time of a step",
    Quantity.TOKENS: "tokens/s per GPU",
    Quantity.MFU: "MFU",
    Quantity.COMM: "waiting for collectives",
    Quantity.BUS: "bus bandwidth",
    Quantity.PEAK: "peak of tensors per GPU",
    Quantity.RESERVED: "held by PyTorch per GPU",
    Quantity.STATES: "model states per GPU",
    Quantity.HOST: "offloaded states per rank",
}
TIME_NOTES = {
    Part.TRAINING: "no single setting explains it: health rules name slow ranks, `dstrain doctor` clocks and links",
    Part.COMPUTATION: "every rank computes longer than planned: `dstrain doctor` compares clocks, power and kernels",
    Part.HOST: "the GPU waits for the host: a larger micro_batch, packing or torch_compile gives it more per launch",
    Part.OTHER: "callbacks and logging: raise logging_steps, or look at own callbacks",
    Part.SLOWER_RANKS: "health rules name the slow rank; `dstrain doctor` compares clocks, power and other processes",
}
"""Advice on a part of the time that is longer than planned, if no single setting explains it."""
NONE = "-"
"""A figure that is not known."""
_CPU_NAMES = {Quantity.TOKENS: "tokens/s per rank", Quantity.STATES: "model states per rank"}


def figure(quantity: Quantity, value: float | None) -> str:
    """Returns a quantity with its unit.

    >>> figure(Quantity.MFU, 0.4123), figure(Quantity.STEP_S, 75), figure(Quantity.PEAK, None)
    ('41.2 %', '1 min 15 s', '-')
    """
    if value is None:
        return NONE
    if quantity in {Quantity.STEP_S, Quantity.COMM}:
        return format_seconds(value)
    if quantity is Quantity.BUS:
        return format_rate(value)
    if quantity is Quantity.MFU:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if quantity is Quantity.TOKENS else format_bytes(value)


def split_text(parts: Sequence[StepPart]) -> str:
    """Returns the parts of a step with their shares, the largest first; empty without a part.

    >>> from dstrain.monitor.comparison import Part
    >>> split_text([StepPart(part=Part.COMPUTATION, planned=0.7, measured=0.6),
    ...     StepPart(part=Part.COMMUNICATION, planned=0.1, measured=0.4)])
    'computation 0.60 s (60 %, 0.70 s planned), exposed communication 0.40 s (40 %, 0.10 s planned)'
    """
    whole = sum(one.measured for one in parts)
    return ", ".join(
        f"{one.part} {format_seconds(one.measured)} ({100 * one.measured / whole:.0f} %{_planned(one)})"
        for one in sorted(parts, key=lambda one: -one.measured)
        if whole and one.measured >= _LEAST * whole
    )


def _planned(one: StepPart) -> str:
    return f", {format_seconds(one.planned)} planned" if one.planned else ""


_LEAST = 0.005
"""Share of a step from which a part is named."""


def off_text(comparison: Comparison) -> str:
    """Returns how far a measurement is off its plan, with the range of the plan."""
    if comparison.off is None:
        return ""
    spread = f" (plan ± {100 * comparison.uncertainty:.0f} %)" if comparison.uncertainty else ""
    return f"{100 * comparison.off:+.1f} %{spread if comparison.quantity is Quantity.STEP_S else ''}"


def measured_text(comparison: Comparison) -> str:
    """Returns the measurement, as a range if ranks differ."""
    ends = [figure(comparison.quantity, end(comparison.ranks)) for end in (min, max) if comparison.ranks]
    return " to ".join(dict.fromkeys(ends)) or figure(comparison.quantity, comparison.measured)


def name_of(quantity: Quantity, cluster: Cluster | None) -> str:
    """Returns the name of a quantity: per GPU, or per rank for a run on CPUs."""
    on_cpu = cluster is not None and cluster.gpu.is_cpu
    return _CPU_NAMES.get(quantity, NAMES[quantity]) if on_cpu else NAMES[quantity]


def difference_text(difference: Difference) -> str:
    """Returns the part that differs most, in words."""
    form = format_seconds if difference.is_time else format_bytes
    of = "of a step" if difference.is_time else "per GPU"
    planned = form(difference.planned) if difference.planned else "none"
    return (
        f"{difference.part}: {form(difference.measured)} {of}, {planned} planned"
        f" ({100 * difference.share:+.1f} % of the whole)"
    )


COLUMNS = ("", "planned", "measured", "off")
"""The columns of `rows_of`."""


def rows_of(comparisons: Sequence[Comparison], cluster: Cluster | None) -> list[tuple[str, ...]]:
    """Returns a row of cells for each figure."""
    return [
        (name_of(one.quantity, cluster), figure(one.quantity, one.planned), measured_text(one), off_text(one))
        for one in comparisons
    ]


def table(comparisons: Sequence[Comparison], cluster: Cluster | None) -> list[str]:
    """Returns planned figures beside measured ones; the measured ones alone if nothing is planned."""
    rows = rows_of(comparisons, cluster)
    if not rows:
        return ["nothing was planned, and nothing was measured"]
    return aligned([COLUMNS, *rows], right={1, 2})
