"""The words of a comparison with the plan, for the report and for the log of a run."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.facts.cluster.cluster import Cluster
from dstrain.monitor.comparison import Comparison, Difference, Part, Quantity, StepPart
from dstrain.units import format_bytes, format_seconds

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
"""What to do for a part of the time that is longer than planned, if no single setting explains it."""
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


def format_rate(bytes_per_s: float) -> str:
    """Returns a bandwidth as it is written of links: in powers of ten.

    >>> format_rate(3.6e11), format_rate(4.2e8)
    ('360 GB/s', '0.42 GB/s')
    """
    return f"{bytes_per_s / 1e9:.3g} GB/s"


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
    """Returns what was measured, as a range if ranks differ."""
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
"""What the cells of `rows_of` are."""


def rows_of(comparisons: Sequence[Comparison], cluster: Cluster | None) -> list[tuple[str, ...]]:
    """Returns a row of cells for each figure."""
    return [
        (name_of(one.quantity, cluster), figure(one.quantity, one.planned), measured_text(one), off_text(one))
        for one in comparisons
    ]


def table(comparisons: Sequence[Comparison], cluster: Cluster | None) -> list[str]:
    """Returns the figures of the plan beside those that were measured; without the former where nothing is planned."""
    rows = rows_of(comparisons, cluster)
    if not rows:
        return ["nothing was planned, and nothing was measured"]
    lines = [COLUMNS, *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(3)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{row[at]:>{widths[at]}}" for at in (1, 2)), row[3]]).rstrip()
        for row in lines
    ]
