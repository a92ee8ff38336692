"""Stores the loss of a micro-batch with a checkpoint, and compares it with the reloaded model's.

The micro-batch is the last one of rank 0 before the save (with sequence parallelism, of its group), evaluated
without dropout, on all ranks alike: any number of ranks computes the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dstrain.errors import RunFailed
from dstrain.job.schema import Job
from dstrain.monitor.meter import COUNTS
from dstrain.train.loss import mean_loss

FILE = "resume_check.pt"
_WARNED, _ENDS = 1e-3, 1e-2
"""Relative differences of the loss that are a warning, and that end the run."""
_LEAST = 0.1
"""Smaller losses are compared as if they were this large: rounding of kernels exceeds a loss near zero."""

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Loss stored with a checkpoint."""

    kind: str
    """How the job makes micro-batches; one of another kind does not fit the model's inputs."""
    batches: Sequence[Inputs]
    """Of the ranks of the first group."""
    loss: float


def kind_of(job: Job) -> str:
    """Returns how a job makes micro-batches."""
    return f"task {job.task}, sp {job.sp}, {'packed' if job.packing else 'not packed'}"


def own_batch(inputs: Inputs) -> Inputs | None:
    """Returns a micro-batch in host memory; None for one with more than tensors, which is not stored."""
    rest = {name: value for name, value in inputs.items() if name != COUNTS}
    is_plain = all(isinstance(value, torch.Tensor) for value in rest.values())
    return {name: value.cpu() for name, value in rest.items()} if is_plain else None


def of_first_group(own: Inputs | None, size: int, group: Any) -> list[Inputs]:
    """Returns the micro-batches of the first `size` ranks, if they can be stored; all ranks run it together.

    `group` is a gloo group of all ranks; None with one rank.
    """
    batches = [_of_rank(own, source, group) for source in range(size)]
    return [] if None in batches else batches


def _of_rank(own: Any, source: int, group: Any) -> Any:
    if group is None:
        return own
    values = [own if dist.get_rank() == source else None]
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


def loss_on(
    batches: Sequence[Inputs], index: int, totals_of: Callable[[Inputs], torch.Tensor], group: Any
) -> float | None:
    """Returns the loss of the micro-batches, evaluated by all ranks; None without one that is finite.

    `index` is this rank's; `totals_of` returns the sum of the losses and their number: (2,), float64.
    """
    loss, _ = mean_loss(totals_of, [batches[index % len(batches)]], group)
    return loss if math.isfinite(loss) else None


def write(folder: Path, known: Known) -> None:
    """Writes the loss beside a checkpoint."""
    torch.save({"kind": known.kind, "batches": list(known.batches), "loss": known.loss}, folder / FILE)


def read(folder: Path, *, is_reader: bool, group: Any) -> Known | None:
    """Returns the loss stored with a checkpoint, on all ranks; one of them reads it. None if it has none."""
    known = torch.load(folder / FILE, weights_only=True) if is_reader and (folder / FILE).is_file() else None
    known = _of_rank(known, 0, group)
    return None if known is None else Known(**known)


def verdict(name: str, known: Known, loss: float | None) -> str:
    """Returns the line that compares the losses. Raises RunFailed if the difference is too large."""
    difference = math.inf if loss is None else abs(loss - known.loss) / max(abs(known.loss), _LEAST)
    losses = f"a loss of {known.loss:.6g} when {name} was saved, and {'NaN' if loss is None else f'{loss:.6g}'} now"
    text = f"resume check: {losses} (difference {difference:.2g})"
    if difference > _ENDS:
        raise RunFailed(
            text,
            hint="The model that was loaded is not that which was saved: model, job or packages have changed, or files "
            "of the checkpoint. `dstrain run --no-resume-check` trains all the same.",
        )
    return f"warning: {text}" if difference > _WARNED else text
