"""Runs the heaviest micro-batch of a run forward and backward, and says whether loss and gradients are finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # type: ignore[import-untyped]
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # type: ignore[import-untyped]
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # type: ignore[import-untyped]
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # type: ignore[import-untyped]
from deepspeed.runtime.zero.stage_1_and_2 import (  # type: ignore[import-untyped]
    INITIAL_MICRO_STEP_ID,
    DeepSpeedZeroOptimizer,
)

from dstrain.choices import Optimizer
from dstrain.monitor.outcomes import Check, CheckName, Figures
from dstrain.train.data.collate import PackedRows
from dstrain.train.data.pairs import PairData, column
from dstrain.train.data.stream import Stream
from dstrain.train.loss import trial
from dstrain.train.memory import reserved_for_first_step
from dstrain.train.parts.training import Training
from dstrain.train.rank import of_all_ranks
from dstrain.units import format_bytes

_OF_STAGE_0 = (BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer)


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
    return min(2, int(trainer.args.gradient_accumulation_steps))


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


def run_worst_batch(trainer: Training, batches: Any, *, group: Any) -> tuple[list[Pass], Check]:
    """Runs the heaviest micro-batch, the same one on all ranks; returns each rank's memory and the finding.

    `group` is a gloo group of all ranks; None with one.
    """
    engine, rows = trainer.model_wrapped, worst_rows(trainer, batches)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if can_discard(engine):
        # the gradients are thrown away, so that the first step is the same as without this check
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
    return of_all_ranks(own, group), Check(name=CheckName.WORST_BATCH, passed=True, text=text, figures=figures)


def _forward_and_backward(trainer: Training, rows: list[Any]) -> Pass:
    """Returns this rank's pass. Memory for the states that the first step will add is reserved meanwhile."""
    engine: Any = trainer.model_wrapped
    bytes_per_state = 1 if trainer.job.optimizer is Optimizer.ADAMW_8BIT else None
    reserved = reserved_for_first_step(engine, bytes_per_state=bytes_per_state)
    state = trainer.accelerator.gradient_state
    trainer.current_gradient_accumulation_steps = 1  # the loss of a micro-batch, not its part of a step
    with without_step(engine), norms_of(engine.module) as norms:
        for number in range(1, num_passes(trainer) + 1):
            norms.by_name.clear()
            inputs = trainer.data_collator(rows)
            count = trainer.items_in(inputs)
            state._set_sync_gradients(number == num_passes(trainer))
            loss = trainer.training_step(engine, inputs, count)
        norm, nonfinite = norms.total(loss_scale(engine)), norms.first_nonfinite()
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


def finiteness(ranks: list[Pass], *, scale: float) -> Check:
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
    said = partial(Check, name=CheckName.GRADIENTS, figures=figures)
    bad = [index for index, each in enumerate(ranks) if each.nonfinite or not math.isfinite(each.loss)]
    # a finite loss with gradients that overflow is what the first loss scales are for
    if bad and scale > 1 and all(math.isfinite(each.loss) for each in ranks):
        text = f"too large for fp16 at a loss scale of {scale:,.0f}, as in many first steps: DeepSpeed lowers it"
        return said(passed=True, text=text)
    if bad:
        where = f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:8]))}{' …' if len(bad) > 8 else ''}"
        name = ranks[bad[0]].nonfinite
        what = f"the gradient of {name}" if name else "the loss"
        return said(passed=False, text=f"not finite on {where}: {what}")
    if not norms:
        return said(passed=True, text="the loss is finite")
    ends = " to ".join(dict.fromkeys(f"{end(norms):.3g}" for end in (min, max)))
    return said(passed=True, text=f"finite, norm {ends}{f' on {len(ranks)} ranks' if len(ranks) > 1 else ''}")


def heaviest(data: Any, count: int, among: Sequence[int] | None = None) -> list[int]:
    """Returns the indices of the `count` heaviest rows, the heaviest first; fewer rows than that are repeated.

    The longest row decides the shape of a micro-batch, which is padded to it, and every epoch has it. Of rows of one
    length the one with the longest samples is heavier, by attention. `among`: indices of the rows to choose from; None:
    all of them.
    """
    tokens, squares = _sizes(data)
    rows = np.arange(len(tokens)) if among is None else np.unique(np.asarray(among))
    order = rows[np.lexsort((-rows, squares[rows], tokens[rows]))[::-1]]
    return [int(row) for row in np.resize(order[:count], count)]


def _sizes(data: Any) -> tuple[Any, Any]:
    """Returns the tokens of each row, and the sum of length² over its samples: (rows,) each."""
    if isinstance(data, PackedRows):
        lengths = column(data.samples, "length")
        return data.rows.sums(lengths), data.rows.sums(lengths**2)
    if isinstance(data, PairData):
        lengths = data.lengths()  # each sequence is a row of its own
        return lengths.max(axis=1), (lengths**2).sum(axis=1)
    lengths = column(data, "length")
    return lengths, lengths**2


def drawn(batches: Any, count: int) -> list[int]:
    """Returns the rows that the first `count` draws of the first epoch take; the order of training stays as it is.

    `batches`: a data loader of accelerate, whose sampler is seeded by the epoch.
    """
    level = batches
    while getattr(level, "batch_sampler", None) is not None:
        level = level.batch_sampler
    assert isinstance(level.sampler, SeedableRandomSampler)
    sampler = copy.copy(level.sampler)
    sampler.generator, sampler.epoch = None, 0
    return list(islice(sampler, count))


@dataclass(slots=True, kw_only=True)
class Norms:
    """The norms of this rank's own gradients, before they are reduced."""

    by_name: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Parameter → norms of its gradients: several of one that checkpointing visits again."""

    def total(self, scale: float) -> float:
        """Returns the norm of all gradients; `scale` is the factor of the loss."""
        every = [norm for norms in self.by_name.values() for norm in norms]
        return float(torch.stack(every).norm()) / scale if every else 0.0

    def first_nonfinite(self) -> str | None:
        """Returns a parameter whose gradient is not finite; None without one."""
        every = [(name, norm) for name, norms in self.by_name.items() for norm in norms]
        if not every:
            return None
        is_finite = torch.stack([norm for _, norm in every]).isfinite().tolist()
        return next((name for (name, _), finite in zip(every, is_finite, strict=True) if not finite), None)


@contextmanager
def norms_of(model: torch.nn.Module) -> Iterator[Norms]:
    """Notes the norm of each gradient when autograd has it, as ZeRO does not keep the gradients of a rank."""
    norms = Norms()

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)  # without a copy of the gradient
            norms.by_name.setdefault(name, []).append(norm)

        return note

    handles = [
        parameter.register_hook(noting(name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_step(engine: Any) -> Iterator[None]:
    """Passes within it make no optimizer step, and leave no gradients, counters or random numbers behind."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    was_training = engine.training
    engine.step = lambda *arguments, **options: None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        del engine.step  # restores the method of the class
        engine.train(was_training)
    _discard(engine)


def can_discard(engine: Any) -> bool:
    """Returns whether `without_step` leaves no trace in this engine.

    It is not tried with optimizers that write gradients to NVMe, nor with kinds of them that DeepSpeed adds.
    """
    optimizer = engine.optimizer
    if type(optimizer) in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        return not getattr(optimizer, "swap_optimizer", False)
    return type(optimizer) in _OF_STAGE_0 or isinstance(optimizer, torch.optim.Optimizer)


def _discard(engine: Any) -> None:
    """Discards gradients as DeepSpeed does when a step is skipped, and zeroes the buffers that the next step reuses.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: step; runtime/zero/stage3.py: _pre_step, _overflow_clean_up.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        # as before a first micro-batch, or the next one adds to these gradients
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        for tensors in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            tensors.update(dict.fromkeys(tensors))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
            optimizer.accumulated_grads_in_cpu.clear()
            _zero(master.grad for master in optimizer.single_partition_of_fp32_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._pre_step()
        optimizer._overflow_clean_up(optimizer.loss_scale)
        _zero([optimizer.grad_partitions_flat_buffer])
        if optimizer.offload_optimizer:
            _zero(master.grad for master in optimizer.fp32_partitioned_groups_flat)
    else:
        optimizer.zero_grad()
    engine.zero_grad()


def _zero(gradients: Any) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def loss_scale(engine: Any) -> float:
    """Returns the factor by which DeepSpeed multiplies the loss: 1 except in fp16."""
    return float(engine._get_optimizer_loss_scale()) if engine.fp16_enabled() else 1.0
