"""Measures each step of a rank, and says what made gradients not finite: a part of the Trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dstrain.choices import Precision
from dstrain.heartbeat import Phase
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.health.nonfinite import Finding, Nonfinite, require_finite_loss, require_trained
from dstrain.monitor.meter import COUNTS, Counts
from dstrain.train.data.rendering import IGNORED
from dstrain.train.parts.training import Training
from dstrain.train.rank import of_all_ranks
from dstrain.units import counted

_MOST_TOLD = 3
"""Steps whose gradients are not finite that are looked into, in a start: each costs a gather."""
RULE = "nonfinite_step"
"""Id of the findings."""
_FEW_ROWS, _FEW_TOKENS = 4, 12
"""Rows of a micro-batch that are quoted, and tokens of each."""


class StepWatch:
    """Measures the steps of a rank."""

    def __init__(self, trainer: Training, metrics: MetricsCallback, *, counts_rows: bool) -> None:
        """`counts_rows`: whether the rows of this rank count; the other ranks of its group may have the same ones."""
        self._trainer = trainer
        self._metrics = metrics
        self._counts_rows = counts_rows
        limit = trainer.job.stop_on_nonfinite
        self._gradients = Nonfinite("gradients", limit=limit, tell=metrics.tell)
        self._losses = Nonfinite("losses", limit=limit, tell=metrics.tell)
        self._evidence = Evidence()
        self._num_told = 0
        self._num_first_skipped = 0
        self._rate = 0.0
        self.last_inputs: dict[str, Any] | None = None
        """The last micro-batch of the present step."""

    def begin(self) -> None:
        """Starts with an engine, which may have skipped steps before."""
        self._skipped = self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that DeepSpeed has skipped since training began, because their gradients were not finite."""
        return int(self._trainer.model_wrapped.skipped_steps)

    def begin_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Starts a step, and returns its micro-batches, whose waiting time is counted."""
        self._evidence.begin()
        self.last_inputs = None
        self._metrics.meter.begin_step()
        return self._metrics.meter.timed(batches)

    def count(self, batches: Iterable[dict[str, Any]]) -> None:
        """Counts the tokens of the micro-batches of a step."""
        for batch in batches:
            if not self._counts_rows:
                batch[COUNTS] = Counts()
            self._metrics.meter.count(batch)

    def begin_pass(self, inputs: dict[str, Any]) -> None:
        """Notes a micro-batch, and the rate of its step: an engine that builds the optimizer sets the next one early.

        Source: deepspeed 0.19.8 runtime/engine.py: _take_model_step.
        """
        self.last_inputs = dict(inputs)
        self._rate = float(self._trainer.optimizer.param_groups[0]["lr"])

    def end_pass(self, loss: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Notes the loss of a micro-batch until the step is done."""
        self._evidence.note(loss, tokens, labels)

    def complete(self, logs: dict[str, float]) -> None:
        """Adds the metrics of the window, so that trainer_state.json, sinks and metrics.jsonl agree."""
        if "learning_rate" in logs:
            logs["learning_rate"] = self._rate
        logs.update(self._metrics.drain())
        if self._trainer.job.precision is Precision.FP16:
            logs["skipped_steps"] = self.skipped_steps
            logs["loss_scale"] = float(getattr(self._trainer.model_wrapped.optimizer, "loss_scale", 1.0))

    def note_loss(self, logs: dict[str, float]) -> None:
        """Notes a logged loss, if the engine has no norm: without ZeRO and with fp32."""
        if "grad_norm" not in logs:
            self._losses.note(self._trainer.state.global_step, is_finite=math.isfinite(logs["loss"]))

    def note_gradients(self, grad_norm: Any) -> None:
        """Notes whether the gradients of a step are finite, and says what made them so; all ranks have the same norm.

        Raises RunFailed after too many consecutive steps without finite gradients.
        """
        step = self._trainer.state.global_step
        skipped, self._skipped = self._skipped, self.skipped_steps
        is_finite = skipped == self._skipped and (grad_norm is None or math.isfinite(grad_norm))
        if skipped != self._skipped and self._num_first_skipped == step - 1:
            self._num_first_skipped += 1
        if not is_finite and self._num_told < _MOST_TOLD:
            self._num_told += 1
            with self._metrics.meter.aside():
                self._metrics.tell(self._evidence.findings(step, self._trainer.processing_class, self._trainer.group))
        self._gradients.note(step, is_finite=is_finite)

    @contextmanager
    def between_steps(self, *, evaluates: bool, saves: bool) -> Iterator[None]:
        """Context of what follows a step; the time of a checkpoint or an evaluation does not count."""
        step, is_long = self._trainer.state.global_step, evaluates or saves
        if is_long:
            self._trainer.heartbeat.send(step, Phase.EVALUATING if evaluates else Phase.SAVING)
        with self._metrics.meter.aside() if is_long else nullcontext():
            yield
        if is_long:
            self._trainer.heartbeat.send(step, Phase.STEP)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Takes the time of a checkpoint."""
        self._trainer.heartbeat.send(self._trainer.state.global_step, Phase.SAVING)
        began = time.monotonic()
        yield
        self._metrics.saved(time.monotonic() - began)

    def require_usable(self, eval_loss: float | None) -> None:
        """Raises RunFailed, on all ranks, if this training has not made a model that can be used.

        `eval_loss`: of the final model; None if it was not evaluated.
        """
        job, step = self._trainer.job, self._trainer.state.global_step
        if job.stop_on_nonfinite:
            is_fp16 = job.precision is Precision.FP16
            require_trained(skipped=self.skipped_steps, first=self._num_first_skipped, steps=step, fp16=is_fp16)
        is_finite = all(of_all_ranks(self._evidence.is_finite, self._trainer.group))
        require_finite_loss("the loss", step, is_finite=is_finite)
        require_finite_loss("the evaluation loss", step, is_finite=eval_loss is None or math.isfinite(eval_loss))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of a step."""

    rank: int
    index: int
    """From 0, in the rank's step."""
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
        """Returns a finding for each rank with a loss that is not finite; all ranks must call.

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
        f"(loss {batch.loss:.4g}, {counted(batch.rows, 'row')}{masked}): {', '.join(map(repr, batch.texts))}",
        rank=batch.rank,
    )
