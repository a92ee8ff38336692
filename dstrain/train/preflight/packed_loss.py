"""Compares the loss of a packed row with its samples' loss, each in a row of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.train.data.packing import PackedRows, Packing
from dstrain.train.evaluation import mean_loss
from dstrain.train.preflight.found import Found

MOST_SAMPLES = 4
"""Samples of a row that are compared."""
_EXACT = 1e-3
"""Difference of two losses, over the loss, that the order of sums explains in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoss:
    """The mean loss per token of the same samples, computed twice."""

    packed: float
    """In one row."""
    alone: float
    """One by one."""
    targets: int
    """Tokens with loss."""
    targets_alone: int

    def agrees(self, tolerance: float) -> bool:
        """Returns whether both have the same targets and, up to a share of `tolerance`, the same loss.

        >>> PackedLoss(packed=2.0, alone=2.001, targets=9, targets_alone=9).agrees(1e-3)
        True
        """
        return self.targets == self.targets_alone and abs(self.packed - self.alone) <= tolerance * abs(self.alone)

    def found(self, count: int, tolerance: float, dtype: str) -> Found:
        """Judges packing by the losses of `count` samples."""
        figures = {"packed": self.packed, "alone": self.alone, "tolerance": tolerance}
        text = f"{count} samples have a loss of {self.packed:.5g} in one row, {self.alone:.5g} one by one"
        if self.agrees(tolerance):
            return Found(passed=True, text=text, figures=figures)
        why = f"rounding in {dtype} explains {tolerance:.1%}"
        if self.targets != self.targets_alone:
            why = f"{self.targets:,} tokens have loss there, {self.targets_alone:,} here"
        return Found(passed=False, text=f"{text}: {why}", figures=figures)


def tolerance(dtype: torch.dtype, *, tf32: bool) -> float:
    """Returns the share by which two losses of the same tokens may differ when a model computes in `dtype`.

    A loss is a difference of logits, each of which is rounded to half a unit in the last place in every layer; four
    units leave room for kernels that sum in another order. In bf16 that is 3 %: samples that see each other are found
    by `isolation.Trial`, to the last bit.

    >>> tolerance(torch.float32, tf32=False), tolerance(torch.bfloat16, tf32=False)
    (0.001, 0.03125)
    """
    eps = 2**-10 if tf32 and dtype == torch.float32 else torch.finfo(dtype).eps
    return max(_EXACT, 4 * eps)


def some_samples(data: PackedRows) -> list[int] | None:
    """Returns the first samples of the first row that holds several; None if every row holds one."""
    row = next((row for row in data.rows if len(row) > 1), None)
    return None if row is None else [int(sample) for sample in row[:MOST_SAMPLES]]


def compare(
    data: PackedRows,
    members: list[int],
    *,
    batch_of: Callable[[Any], Mapping[str, Any]],
    totals_of: Callable[[Mapping[str, Any]], torch.Tensor],
    group: Any,
) -> PackedLoss:
    """Returns the losses of some samples in one row and one by one; collective over `group`, a gloo group of all ranks.

    `batch_of` returns the micro-batch of a row, and `totals_of` the sum of its losses and its targets: (2,), float64.
    """

    def row_of(*samples: int) -> Any:
        return PackedRows(samples=data.samples, rows=Packing.of([samples]))[0]

    packed, targets = mean_loss(totals_of, [batch_of(row_of(*members))], group)
    alone, targets_alone = mean_loss(totals_of, [batch_of(row_of(sample)) for sample in members], group)
    return PackedLoss(packed=packed, alone=alone, targets=targets, targets_alone=targets_alone)
