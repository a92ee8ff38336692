"""Means of a task's figures over the samples of a logging window or an evaluation, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist


class Figures:
    """Sums of figures on the device; nothing waits for it until the means are asked for."""

    def __init__(self) -> None:
        """Starts without samples."""
        self._names: tuple[str, ...] = ()
        self._sums: Any = None

    def add(
        self,
        figures: Mapping[str, torch.Tensor],
        counts: torch.Tensor,
        among: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Adds the figures of samples, (samples,) each, of those that count: (samples,).

        `among`: figure → those of the samples that have it, (samples,), where not all of them do.
        """
        weights = torch.stack([counts * among[name] if name in among else counts for name in figures]).double()
        values = torch.stack([figure.detach().double() for figure in figures.values()])
        sums = torch.cat([(values * weights).sum(-1), weights.sum(-1), counts.double().sum().unsqueeze(0)])
        self._names = tuple(figures)
        self._sums = sums if self._sums is None else self._sums + sums

    def drain(self, group: Any) -> tuple[dict[str, float], int]:
        """Returns the mean of each figure over the samples of all ranks, and their number, and starts anew.

        A figure that no sample has is left out.

        `group` is a gloo group of all ranks; None for a single one.
        """
        if self._sums is None:
            return {}, 0
        sums, self._sums = self._sums.cpu(), None
        if group is not None:
            dist.all_reduce(sums, group=group)
        *both, count = sums.tolist()
        totals, counts = both[: len(self._names)], both[len(self._names) :]
        means = zip(self._names, totals, counts, strict=True)
        return {name: total / number for name, total, number in means if number}, int(count)
