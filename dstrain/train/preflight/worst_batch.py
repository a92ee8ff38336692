"""Runs the heaviest micro-batch of a run forward and backward, and says whether loss and gradients are finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.choices import Optimizer
from dstrain.train.data.stream import Stream
from dstrain.train.loss_trials import trial
from dstrain.train.optimizer_states import reserved_for_first_step
from dstrain.train.preflight import passes
from dstrain.train.preflight.found import Figures, Found
from dstrain.train.preflight.heaviest import drawn, heaviest
from dstrain.train.rank import of_all_ranks
from dstrain.train.training import Training
from dstrain.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Memory of a rank during a forward and backward pass."""

    loss: float
    norm: float | None
    """Norm of its own gradients; None without a backward pass."""
    nonfinite: str | None
    """A parameter whose gradient is not finite."""
    reserved_bytes: int = 0
    """Memory that was set aside for the states that the first step adds."""


def num_passes(trainer: Training) -> int:
    """Returns how often the micro-batch runs: twice if gradients accumulate, as the first one's stay for the second.

    A step of the run costs no less.
    """
    return min(2, trainer.args.gradient_accumulation_steps)


def worst_rows(trainer: Training, batches: Any) -> list[Any]:
    """Returns the rows of the heaviest micro-batch; of a run that is shorter than an epoch, among those it draws.

    A stream's lengths are unknown, so its rows count as full.
    """
    data: Any = trainer.train_dataset
    size = trainer.args.per_device_train_batch_size
    if isinstance(data, Stream):
        return [data.longest()] * size
    steps = trainer.state.max_steps * trainer.args.gradient_accumulation_steps
    count = steps * size * trainer.num_shares
    return [data[row] for row in heaviest(data, size, drawn(batches, count) if count < len(data) else None)]


def run_worst_batch(trainer: Training, batches: Any, *, group: Any) -> tuple[list[Pass], Found]:
    """Runs the heaviest micro-batch, the same one on all ranks; returns each rank's memory and the finding.

    `group` is a gloo group of all ranks; None with one.
    """
    engine, rows = trainer.model_wrapped, worst_rows(trainer, batches)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if passes.can_discard(engine):
        own, what = _forward_and_backward(trainer, rows), "forward and backward"
    else:
        own, what = _forward(trainer, rows), "forward alone: this optimizer would keep the gradients"
    batch = trainer.batch
    assert batch is not None
    text = f"{batch.rows} × {batch.tokens_per_row:,} tokens, {what}, loss {own.loss:.4g}"
    figures: dict[str, Any] = {
        "rows": batch.rows,
        "tokens_per_row": batch.tokens_per_row,
        "loss": own.loss,
        "reserved_bytes": own.reserved_bytes,
    }
    if on_gpu:
        peaks = of_all_ranks(torch.cuda.max_memory_allocated(), group)
        figures["peak_bytes_by_rank"] = tuple(peaks)
        total = torch.cuda.get_device_properties().total_memory
        text += f", peak {format_bytes(max(peaks))} of {format_bytes(total)}"
    return of_all_ranks(own, group), Found(passed=True, text=text, figures=figures)


def _forward_and_backward(trainer: Training, rows: list[Any]) -> Pass:
    """Returns this rank's pass. Memory for the states that the first step will add is reserved meanwhile."""
    engine: Any = trainer.model_wrapped
    bytes_per_state = 1 if trainer.job.optimizer is Optimizer.ADAMW_8BIT else None
    reserved = reserved_for_first_step(engine, bytes_per_state=bytes_per_state)
    state = trainer.accelerator.gradient_state
    trainer.current_gradient_accumulation_steps = 1  # the loss of a micro-batch, not its part of a step
    with passes.without_step(engine), passes.norms_of(engine.module) as norms:
        for number in range(1, num_passes(trainer) + 1):
            norms.by_name.clear()
            inputs = trainer.data_collator(rows)
            count = trainer.items_in(inputs)
            state._set_sync_gradients(number == num_passes(trainer))
            loss = trainer.training_step(engine, inputs, count)
        norm, nonfinite = norms.total(passes.loss_scale(engine)), norms.first_nonfinite()
    state._set_sync_gradients(True)
    return Pass(loss=float(loss), norm=norm, nonfinite=nonfinite, reserved_bytes=reserved.nbytes)


def _forward(trainer: Training, rows: list[Any]) -> Pass:
    """Returns the loss of a micro-batch without gradients."""
    engine: Any = trainer.model_wrapped
    with trial(engine), trainer.compute_loss_context_manager():
        inputs = trainer.data_collator(rows)
        count = trainer.items_in(inputs)
        loss: Any = trainer.compute_loss(engine, trainer.inputs_of(inputs), num_items_in_batch=count)
    return Pass(loss=float(loss), norm=None, nonfinite=None)


def finiteness(ranks: list[Pass], *, scale: float) -> Found:
    """Returns whether loss and gradients are finite on every rank, and which are not.

    `scale` is the factor of the loss in fp16, in which gradients overflow until DeepSpeed has lowered it; else 1.

    >>> ranks = [Pass(loss=2.0, norm=1.5, nonfinite=None), Pass(loss=2.0, norm=math.nan, nonfinite="lm_head.weight")]
    >>> finiteness(ranks[:1], scale=1).text
    'finite, norm 1.5'
    >>> finiteness(ranks, scale=1).text
    'not finite on rank 1: the gradient of lm_head.weight'
    """
    norms = tuple(each.norm for each in ranks if each.norm is not None)
    figures: Figures = {"loss_by_rank": tuple(each.loss for each in ranks), "norm_by_rank": norms}
    bad = [index for index, each in enumerate(ranks) if each.nonfinite or not math.isfinite(each.loss)]
    if bad and scale > 1 and all(math.isfinite(each.loss) for each in ranks):
        text = f"too large for fp16 at a loss scale of {scale:,.0f}, as in many first steps: DeepSpeed lowers it"
        return Found(passed=True, text=text, figures=figures)
    if bad:
        where = f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:8]))}{' …' if len(bad) > 8 else ''}"
        name = ranks[bad[0]].nonfinite
        what = f"the gradient of {name}" if name else "the loss"
        return Found(passed=False, text=f"not finite on {where}: {what}", figures=figures)
    if not norms:
        return Found(passed=True, text="the loss is finite", figures=figures)
    ends = " to ".join(dict.fromkeys(f"{end(norms):.3g}" for end in (min, max)))
    return Found(passed=True, text=f"finite, norm {ends}{_on(ranks)}", figures=figures)


def _on(ranks: list[Pass]) -> str:
    return f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
