"""Means of a task's figures over the samples of a logging window or an evaluation, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


class Figures:
    """Sums of figures on the device; nothing waits for it until the means are asked for."""

    def __init__(self) -> None:
        """Starts without samples."""
        self._names: tuple[str, ...] = ()
        self._sums: Any = None

    def add(self, figures: Mapping[str, torch.Tensor], counts: torch.Tensor) -> None:
        """Adds the figures of samples, (samples,) each, of those that count: (samples,)."""
        weights = counts.double()
        values = torch.stack([figure.detach().double() for figure in figures.values()])
        sums = torch.cat([(values * weights).sum(-1), weights.sum().unsqueeze(0)])
        self._names = tuple(figures)
        self._sums = sums if self._sums is None else self._sums + sums

    def drain(self, group: Any) -> tuple[dict[str, float], int]:
        """Returns the mean of each figure over the samples of all ranks, and their number, and starts anew.

        `group` is a gloo group of all ranks; None for a single one.
        """
        if self._sums is None:
            return {}, 0
        sums, self._sums = self._sums.cpu(), None
        if group is not None:
            dist.all_reduce(sums, group=group)
        *totals, count = sums.tolist()
        return {name: total / count for name, total in zip(self._names, totals, strict=True)}, int(count)
