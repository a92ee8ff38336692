"""Computes the micro-batches of a step again, with gradients reduced on the stream of computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # type: ignore[import-untyped]
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # type: ignore[import-untyped]

from dstrain.train.preflight import passes
from dstrain.train.rank import of_all_ranks

if TYPE_CHECKING:
    from dstrain.train.watched import WatchedTrainer

_STREAMS = {
    DeepSpeedZeroOptimizer: "reduction_stream",
    DeepSpeedZeroOptimizer_Stage3: "reduce_and_partition_stream",
}
"""Optimizer → its attribute with the stream that reduces gradients. Source: deepspeed 0.19.8 runtime/zero."""


class Outcome(StrEnum):
    """What the second try says."""

    AGAIN = "again with the same random numbers, they are not finite either: the batch or the weights are the cause"
    RACE = "again, with gradients reduced on the stream of computation, they are finite: a race of overlap_comm"
    ONCE = (
        "again with the same random numbers, they are finite: not the batch, but something that happens once, such as "
        "a fault of memory (nvidia-smi -q -d ECC, dcgmi diag -r 3) or of a kernel"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchInputs:
    """What a micro-batch of a step was computed from."""

    inputs: dict[str, Any]
    arguments: Sequence[Any]
    options: dict[str, Any]


def random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the states of the random numbers of the CPU and of this rank's GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def try_again(trainer: WatchedTrainer, batches: Sequence[MicroBatchInputs], state: Any) -> Outcome | None:
    """Returns what a second forward and backward pass of a skipped step says; all ranks run it together.

    `state` is that of the random numbers before the first pass. None: this engine would keep the gradients, or it
    computes in fp16, whose gradients overflow until the loss scale has been lowered. Takes the time of a step.
    """
    engine: Any = trainer.model_wrapped
    if not passes.can_discard(engine) or engine.fp16_enabled() or not batches:
        return None
    sync = trainer.accelerator.gradient_state
    with _on_one_stream(engine) as was_apart, passes.without_step(engine), passes.norms_of(engine.module) as norms:
        _restore(state)
        losses = []
        for number, batch in enumerate(batches, start=1):
            sync._set_sync_gradients(number == len(batches))
            losses.append(trainer.pass_again(engine, dict(batch.inputs), *batch.arguments, **batch.options))
        own = norms.first_nonfinite() is None and all(math.isfinite(float(loss)) for loss in losses)
        is_zero = type(engine.optimizer) in _STREAMS
        is_reduced = not engine.optimizer.has_overflow() if is_zero else True
    is_finite = all(of_all_ranks(own and is_reduced, trainer._group))
    return Outcome.AGAIN if not is_finite else Outcome.RACE if was_apart else Outcome.ONCE


def known_races() -> str:
    """Returns the known faults of the installed DeepSpeed with overlap_comm, and what to write."""
    from dstrain.config.lint.advisories import ADVISORIES  # loads the rules of lint, which a rank does not need else

    versions = {name: version(name) for name in ("deepspeed", "torch")}
    rows = [row for row in ADVISORIES if row.pointer[-1] == "overlap_comm" and row.affects(versions)]
    known = "; ".join(f"{row.id}, {row.history}" for row in rows)
    known = known or f"none is known of deepspeed {versions['deepspeed']}"
    return f'{known}; write "overlap_comm": false into zero_optimization'


@contextmanager
def _on_one_stream(engine: Any) -> Iterator[bool]:
    """Reduces gradients on the present stream within it; yields whether they have one of their own outside of it."""
    optimizer = engine.optimizer
    name = _STREAMS.get(type(optimizer))
    own = getattr(optimizer, name) if name is not None and torch.cuda.is_available() else None
    overlaps = getattr(optimizer, "overlap_comm", True)  # ZeRO-3 has one stream or the other
    present = torch.cuda.current_stream() if own is not None else None
    if name is None or own is None or own == present or not overlaps:
        yield False
        return
    torch.cuda.synchronize()
    setattr(optimizer, name, present)
    try:
        yield True
    finally:
        torch.cuda.synchronize()
        setattr(optimizer, name, own)


def _restore(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    on_cpu, on_gpu = state
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)
