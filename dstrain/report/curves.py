"""Curves for a page: points, marks and ticks as percentages of a plot, drawn by the template as SVG and text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_POINTS = 800
"""Points of a curve; longer ones keep the lowest and the highest of each stretch."""
_LOG_RATIO = 20
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_TICKS = 4
"""Gaps between the ticks of an axis, about."""
_MARGIN = 0.05
"""Share of the height that is free above and below a curve."""

_LARGEST = 1e300
"""The ends of an axis at most, whose length is finite; values beyond them are outside the plot."""
_LARGEST_EXPONENT = 307
"""Of a power of ten that a float holds five times."""

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    kind: str
    """Its class in the style sheet, such as `train`, `eval` or `planned`."""
    points: str
    """For a polyline: x and y in percent, y from the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A value on an axis, or a mark."""

    at: float
    """Its place in percent, from the left or from the top."""
    text: str
    kind: str = ""
    """Its class in the style sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over the same steps."""

    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Tick, ...]
    """Steps with something to tell."""
    is_logarithmic: bool


def plot(
    curves: Sequence[tuple[str, Pairs]],
    *,
    form: Callable[[float], str],
    marks: Sequence[tuple[float, str, str]] = (),
    from_zero: bool = False,
) -> Plot | None:
    """Returns the plot of curves, each a class with (step, value), or None without a point.

    `marks` are (step, class, text). The axis begins at 0 `from_zero`; else it is logarithmic if positive values span
    more than a factor of 20.

    >>> found = plot([("train", [(1, 2.0), (3, 1.0)])], form=str, marks=[(2, "warning", "spike")])
    >>> found.lines[0].points, found.marks[0].at
    ('0.00,4.55 100.00,95.45', 50.0)
    """
    values = [value for _, pairs in curves for _, value in pairs]
    if not values:
        return None
    steps = [step for _, pairs in curves for step, _ in pairs]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    scale, low, high = _bounds(values, from_zero=from_zero)

    def x(step: float) -> float:
        return 100 * (step - first) / (last - first)

    def y(value: float) -> float:
        return 100 * (high - scale(value)) / (high - low)

    def place(pair: tuple[float, float]) -> str:
        return f"{x(pair[0]):.2f},{y(pair[1]):.2f}"

    ticks = _decades(low, high) if scale is math.log10 else _round_values(low, high)
    return Plot(
        lines=tuple(Line(kind=kind, points=" ".join(map(place, thinned(pairs)))) for kind, pairs in curves),
        x_ticks=tuple(Tick(at=x(step), text=f"{step:,.0f}") for step in _round_values(first, last) if step % 1 == 0),
        y_ticks=tuple(Tick(at=y(value), text=form(value)) for value in ticks),
        marks=tuple(Tick(at=x(step), text=text, kind=kind) for step, kind, text in marks if first <= step <= last),
        is_logarithmic=scale is math.log10,
    )


def _bounds(values: Sequence[float], *, from_zero: bool) -> tuple[Callable[[float], float], float, float]:
    """Returns the scale of an axis, `math.log10` or `float`, and its ends on it."""
    is_logarithmic = not from_zero and min(values) > 0 and max(values) / min(values) > _LOG_RATIO
    scale: Callable[[float], float] = math.log10 if is_logarithmic else float
    low, high = (max(-_LARGEST, min(scale(value), _LARGEST)) for value in (min(values), max(values)))
    margin = _MARGIN * (high - low) or max(abs(high) * _MARGIN, 1e-9)
    return scale, 0.0 if from_zero else low - margin, high + margin


def thinned(pairs: Pairs) -> Pairs:
    """Returns at most about `MOST_POINTS` of the points, the lowest and the highest of each stretch among them.

    >>> len(thinned([(step, step % 7) for step in range(10_000)])) <= MOST_POINTS
    True
    """
    if len(pairs) <= MOST_POINTS:
        return [*pairs, *pairs] if len(pairs) == 1 else pairs  # a line of no length is drawn as a dot
    size = math.ceil(2 * len(pairs) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(pairs), size):
        stretch = pairs[at : at + size]
        ends = {min(stretch, key=lambda pair: pair[1]), max(stretch, key=lambda pair: pair[1])}
        kept += sorted(ends)
    return kept


def _round_values(low: float, high: float) -> list[float]:
    """Returns round values between two bounds, about as many as an axis has ticks.

    >>> _round_values(0.13, 1.9)
    [0.5, 1.0, 1.5]
    """
    raw = (high - low) / _TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Returns powers of ten between two exponents, and twice and five times them if they are few.

    >>> _decades(-0.5, 1.1), _decades(0, 40)
    ([0.5, 1.0, 2.0, 5.0, 10.0], [1.0, 10000000000.0, 1e+20, 1e+30, 1e+40])
    """
    stride = max(1, math.ceil((high - low) / (2 * _TICKS)) if high - low < 3 * _TICKS else round((high - low) / _TICKS))
    exponents = range(math.floor(low), min(math.ceil(high), _LARGEST_EXPONENT) + 1, stride)
    factors = (1,) if high - low > 3 else (1, 2, 5)
    values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [value for value in values if low <= math.log10(value) <= high]
