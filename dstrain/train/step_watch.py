"""Measures each step of a rank, and says what made gradients not finite: a part of the Trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dstrain.choices import Precision
from dstrain.heartbeat import Phase
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.health.nonfinite import Nonfinite, require_finite_loss, require_trained
from dstrain.monitor.meter import COUNTS, Counts
from dstrain.train.nonfinite_step import Evidence
from dstrain.train.rank import of_all_ranks
from dstrain.train.training import Training

_MOST_TOLD = 3
"""Steps whose gradients are not finite that are looked into, in a start: each costs a gather."""


class StepWatch:
    """What a rank measures of its steps."""

    def __init__(self, trainer: Training, metrics: MetricsCallback, *, counts_rows: bool) -> None:
        """`counts_rows`: whether the rows of this rank count; those of its group may be the same ones."""
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

        `eval_loss` is that of the model as it is; None if it was not evaluated.
        """
        job, step = self._trainer.job, self._trainer.state.global_step
        if job.stop_on_nonfinite:
            is_fp16 = job.precision is Precision.FP16
            require_trained(skipped=self.skipped_steps, first=self._num_first_skipped, steps=step, fp16=is_fp16)
        is_finite = all(of_all_ranks(self._evidence.is_finite, self._trainer.group))
        require_finite_loss("the loss", step, is_finite=is_finite)
        require_finite_loss("the evaluation loss", step, is_finite=eval_loss is None or math.isfinite(eval_loss))
