"""Finds the rank, the pass and the micro-batch that made the gradients of a step not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dstrain.monitor.health.nonfinite import Finding
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.rank import of_all_ranks
from dstrain.units import counted

RULE = "nonfinite_step"
"""Id of the findings."""
_FEW_ROWS, _FEW_TOKENS = 4, 12
"""Rows of a micro-batch that are quoted, and tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of a step."""

    rank: int
    index: int
    """From 0, among those of the rank's step."""
    count: int
    """Micro-batches of the rank's step."""
    loss: float
    rows: int
    masked_rows: int
    """Rows without any label."""
    texts: tuple[str, ...]
    """The beginnings of its rows."""


class Evidence:
    """The micro-batches of the present step with their losses, which stay on the device until they are asked for."""

    def __init__(self) -> None:
        """Starts without a step."""
        self.begin()

    def begin(self) -> None:
        """Starts a step."""
        self._passes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def note(self, loss: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Adds a micro-batch; `tokens` and `labels`: (batch, seq)."""
        self._passes.append((loss.detach(), tokens, labels))

    @property
    def is_finite(self) -> bool:
        """Whether all losses of the step are finite."""
        return all(math.isfinite(float(loss)) for loss, _, _ in self._passes)

    def findings(self, step: int, tokenizer: Any, group: Any) -> list[Finding]:
        """Returns what each rank that had a loss that is not finite had; all ranks must call.

        If no rank had one, it arose in backward passes, and the micro-batch with the largest loss is named.
        """
        worst = self._worst(tokenizer, 0 if group is None else dist.get_rank())
        known = [batch for batch in of_all_ranks(worst, group) if batch is not None]
        broken = [batch for batch in known if not math.isfinite(batch.loss)]
        if broken:
            return [_finding(step, batch, "in the forward pass of") for batch in broken]
        largest = max(known, key=lambda batch: batch.loss, default=None)
        return [] if largest is None else [_finding(step, largest, _BACKWARD)]

    def _worst(self, tokenizer: Any, rank: int) -> MicroBatch | None:
        """Returns the first micro-batch whose loss is not finite, otherwise the one with the largest loss."""
        losses = [float(loss) for loss, _, _ in self._passes]
        if not losses:
            return None
        broken = (index for index, loss in enumerate(losses) if not math.isfinite(loss))
        index = next(broken, losses.index(max(losses)))
        _, tokens, labels = self._passes[index]
        return MicroBatch(
            rank=rank,
            index=index,
            count=len(losses),
            loss=losses[index],
            rows=len(tokens),
            masked_rows=0 if labels is None else int((labels == IGNORED).all(dim=1).sum()),
            texts=tuple(tokenizer.decode(row[:_FEW_TOKENS].tolist()) for row in tokens[:_FEW_ROWS]),
        )


_BACKWARD = "in a backward pass or while gradients were reduced: all losses are finite, and largest in"


def _finding(step: int, batch: MicroBatch, where: str) -> Finding:
    place = f"micro-batch {batch.index + 1} of {batch.count} on rank {batch.rank}"
    masked = f", {batch.masked_rows} of them without labels" if batch.masked_rows else ""
    return Finding(
        rule=RULE,
        step=step,
        value=str(batch.loss),
        message=f"step {step}: gradients stopped being finite {where} {place} "
        f"(loss {batch.loss:.4g}, {counted(batch.rows, 'row')}{masked}): {_quoted(batch.texts)}",
        rank=batch.rank,
    )


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(repr(text) for text in texts)
