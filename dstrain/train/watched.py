"""The part of the Trainer that measures a rank, and says what made gradients not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from dstrain.choices import Precision
from dstrain.heartbeat import Phase, Sender
from dstrain.job.schema import Job
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.health.nonfinite import Nonfinite, require_finite_loss, require_trained
from dstrain.monitor.meter import COUNTS, Counts, Meter
from dstrain.train.nonfinite_step import Evidence
from dstrain.train.rank import Rank, of_all_ranks
from dstrain.train.saving import SavingTrainer

_MOST_TOLD = 3
"""Steps whose gradients are not finite that are looked into, in a start: each costs a gather."""


class WatchedTrainer(SavingTrainer):
    """What a rank measures of its steps."""

    _counts_rows = True
    """Whether the rows of this rank count; those of its group may be the same ones."""

    def __init__(
        self, *, job: Job, rank: Rank, metrics: MetricsCallback, heartbeat: Sender, group: Any, **options: Any
    ) -> None:
        """`group` is a gloo group of all ranks or None with one rank; `options` are those of `SavingTrainer`."""
        super().__init__(job=job, rank=rank, **options, callbacks=[metrics])
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._group = group
        self._gradients = Nonfinite("gradients", limit=job.stop_on_nonfinite, tell=metrics.tell)
        self._losses = Nonfinite("losses", limit=job.stop_on_nonfinite, tell=metrics.tell)
        self._evidence = Evidence()
        self._last_inputs: dict[str, Any] | None = None  # of the last micro-batch of the present step
        self._num_told = 0
        self._num_first_skipped = 0
        self._rate = 0.0

    @property
    def meter(self) -> Meter:
        """The meter of this rank."""
        return self._metrics.meter

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of one step, and counts their tokens and the waiting time."""
        self._evidence.begin()
        self._last_inputs = None
        self.meter.begin_step()
        batches, items = super().get_batch_samples(self.meter.timed(epoch_iterator), num_batches, device)
        for batch in batches:
            if not self._counts_rows:
                batch[COUNTS] = Counts()
            self.meter.count(batch)
        return batches, items

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """Returns the loss of a micro-batch after its backward pass, and notes both until the step is done."""
        tokens, labels = inputs["input_ids"], inputs.get("labels")
        optimizer: Any = self.optimizer
        self._rate = float(optimizer.param_groups[0]["lr"])
        self._last_inputs = dict(inputs)
        loss = super().training_step(model, inputs, *arguments, **options)
        self._evidence.note(loss, tokens, labels)
        return loss

    def _get_learning_rate(self) -> float:
        """Returns the rate that the last step used: an engine that builds the optimizer has set the next one already.

        Source: deepspeed 0.19.8 runtime/engine.py: _take_model_step.
        """
        return self._rate

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """Returns the loss of a micro-batch, and times the forward pass."""
        with self.meter.forward(inputs["input_ids"].numel()):
            return super().compute_loss(model, inputs, *arguments, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs together with the metrics of the window, so that trainer_state.json, sinks and metrics.jsonl agree."""
        if "loss" in logs:
            logs.update(self._metrics.drain())
            if self._job.precision is Precision.FP16:
                logs["skipped_steps"] = self.skipped_steps
                engine: Any = self.model_wrapped
                logs["loss_scale"] = float(getattr(engine.optimizer, "loss_scale", 1.0))
        super().log(logs, start_time)
        if "loss" in logs and "grad_norm" not in logs:  # the engine has no norm without ZeRO and with fp32
            self._losses.note(self.state.global_step, is_finite=math.isfinite(logs["loss"]))

    def _prepare_for_training(self, *arguments: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments, **options)  # type: ignore[no-untyped-call]
        self._skipped = self.skipped_steps
        return prepared

    @property
    def skipped_steps(self) -> int:
        """Steps that DeepSpeed has skipped since training began, because their gradients were not finite."""
        engine: Any = self.model_wrapped
        return int(engine.skipped_steps)

    def require_usable(self, eval_loss: float | None) -> None:
        """Raises RunFailed, on all ranks, if this training has not made a model that can be used.

        `eval_loss` is that of the model as it is; None if it was not evaluated.
        """
        step, is_fp16 = self.state.global_step, self._job.precision is Precision.FP16
        if self._job.stop_on_nonfinite:
            require_trained(skipped=self.skipped_steps, first=self._num_first_skipped, steps=step, fp16=is_fp16)
        is_finite = all(of_all_ranks(self._evidence.is_finite, self._group))
        require_finite_loss("the loss", step, is_finite=is_finite)
        require_finite_loss("the evaluation loss", step, is_finite=eval_loss is None or math.isfinite(eval_loss))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint, and takes its time."""
        self._heartbeat.send(self.state.global_step, Phase.SAVING)
        began = time.monotonic()
        super()._save_checkpoint(model, trial)
        self._metrics.saved(time.monotonic() - began)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *arguments: Any, **options: Any) -> None:
        """Logs, saves and evaluates; the time of a checkpoint or an evaluation does not count.

        Transformers subtracts a logged loss from itself to begin anew, which leaves NaN for ever after one that is NaN.
        Raises RunFailed after too many consecutive steps without finite gradients; all ranks have the same norm.
        """
        skipped, self._skipped = self._skipped, self.skipped_steps
        is_finite = skipped == self._skipped and (grad_norm is None or math.isfinite(grad_norm))
        if skipped != self._skipped and self._num_first_skipped == self.state.global_step - 1:
            self._num_first_skipped += 1
        if not is_finite and self._num_told < _MOST_TOLD:
            self._num_told += 1
            with self.meter.aside():
                step = self.state.global_step
                self._metrics.tell(self._evidence.findings(step, self.processing_class, self._group))
        self._gradients.note(self.state.global_step, is_finite=is_finite)
        is_logged = self.control.should_log
        is_long = self.control.should_evaluate or self.control.should_save
        if is_long:
            self._heartbeat.send(
                self.state.global_step, Phase.EVALUATING if self.control.should_evaluate else Phase.SAVING
            )
        with self.meter.aside() if is_long else nullcontext():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **options)
        if is_logged:
            tr_loss.zero_()
        if is_long:
            self._heartbeat.send(self.state.global_step, Phase.STEP)
