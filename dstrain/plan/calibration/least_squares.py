"""Least squares with priors: a few unknowns, each with a first guess and how far that may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Vector = list[float]
Matrix = list[Vector]

_DIFFERENCE = 1e-3
"""Step of a numerical derivative."""
_ITERATIONS = 12
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The most probable values of the unknowns, and how far they may be off."""

    values: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    """Of the values; if residuals are larger than their errors explain, larger by as much."""
    cost: float
    """The minimum."""

    def error(self, index: int) -> float:
        """Returns the standard deviation of a value."""
        return math.sqrt(max(0.0, self.covariance[index][index]))

    def correlation(self, one: int, other: int) -> float:
        """Returns the correlation of two values, -1…1."""
        scale = self.error(one) * self.error(other)
        return self.covariance[one][other] / scale if scale else 0.0


def solve(
    residuals: Callable[[Sequence[float]], Vector],
    errors: Sequence[float],
    priors: Sequence[tuple[float, float]],
    *,
    start: Sequence[float] | None = None,
) -> Solution:
    """Returns the values that minimize residuals², over errors², plus the distance² from the priors, over theirs.

    `residuals` of values: measured − predicted; `errors`: their standard deviations; `priors`: (guess, deviation) of
    each value. Gauss–Newton steps from `start`, by default the guesses, halved while they make it worse.

    >>> one = solve(lambda x: [2.0 - x[0]], [0.01], [(0.0, 10.0)])
    >>> round(one.values[0], 3), round(one.error(0), 3)
    (2.0, 0.01)
    """
    values = [guess for guess, _ in priors] if start is None else [*start]

    def cost(at: Sequence[float], found: Vector) -> float:
        apart = sum(((value - guess) / width) ** 2 for value, (guess, width) in zip(at, priors, strict=True))
        return apart + sum((r / e) ** 2 for r, e in zip(found, errors, strict=True))

    now = residuals(values)
    for _ in range(_ITERATIONS):
        normal, right = _normal(_slopes(residuals, values, now), now, errors, values, priors)
        step = _solved(normal, right)
        least = cost(values, now)
        better = next((there for there in _ahead(values, step) if cost(there, residuals(there)) <= least), None)
        if better is None:  # at a kink
            break
        change = max((abs(new - value) for new, value in zip(better, values, strict=True)), default=0.0)
        values, now = better, residuals(better)
        if change < _TOLERANCE:
            break
    normal, _ = _normal(_slopes(residuals, values, now), now, errors, values, priors)
    scale = max(1.0, sum((r / e) ** 2 for r, e in zip(now, errors, strict=True)) / max(1, len(errors)))
    covariance = tuple(tuple(scale * item for item in row) for row in inverse(normal))
    return Solution(values=tuple(values), covariance=covariance, cost=cost(values, now))


def _ahead(values: Vector, step: Vector) -> Iterator[Vector]:
    """Yields the end of a step, then of its halves."""
    for halvings in range(8):
        yield [value + part / 2**halvings for value, part in zip(values, step, strict=True)]


def _slopes(residuals: Callable[[Sequence[float]], Vector], values: Vector, now: Vector) -> Matrix:
    """Returns the derivatives of the predictions: (residuals, values)."""
    columns = []
    for index in range(len(values)):
        moved = [value + _DIFFERENCE * (index == other) for other, value in enumerate(values)]
        columns.append([(a - b) / _DIFFERENCE for a, b in zip(now, residuals(moved), strict=True)])
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in now]


def _normal(
    slopes: Matrix, now: Vector, errors: Sequence[float], values: Vector, priors: Sequence[tuple[float, float]]
) -> tuple[Matrix, Vector]:
    """Returns matrix and right-hand side of the normal equations."""
    size = range(len(values))
    rows = list(zip(slopes, now, errors, strict=True))
    normal = [[sum(row[i] * row[j] / e**2 for row, _, e in rows) for j in size] for i in size]
    right = [sum(row[i] * r / e**2 for row, r, e in rows) for i in size]
    for i, (guess, width) in enumerate(priors):
        normal[i][i] += 1 / width**2
        right[i] += (guess - values[i]) / width**2
    return normal, right


def _solved(matrix: Matrix, right: Vector) -> Vector:
    return [sum(a * b for a, b in zip(row, right, strict=True)) for row in inverse(matrix)]


def inverse(matrix: Matrix) -> Matrix:
    """Returns the inverse of a positive definite matrix, by Gauss and Jordan with pivots.

    >>> inverse([[2.0, 0.0], [0.0, 4.0]])
    [[0.5, 0.0], [0.0, 0.25]]
    """
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        best = max(range(i, size), key=lambda j: abs(rows[j][i]))
        rows[i], rows[best] = rows[best], rows[i]
        rows[i] = [item / rows[i][i] for item in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
