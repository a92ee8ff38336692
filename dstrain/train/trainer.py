"""The Trainer of a rank: exact resuming, losses per token, and consistent metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import DataLoader, RandomSampler
from transformers.trainer_utils import EvalLoopOutput

from dstrain.choices import Attention, LossKernel
from dstrain.errors import InvalidConfig
from dstrain.heartbeat import NO_RESUME_CHECK, Sender
from dstrain.job.schema import Job
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.meter import COUNTS, Counts
from dstrain.oom import Batch
from dstrain.train.checkpoints import checkpoints, resume_check, universal_checkpoint
from dstrain.train.data.collate import without_adapter
from dstrain.train.data.isolation import Trial, packed_masks, sees_padding
from dstrain.train.data.packing import PackedRows, row_of
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.evaluation import Share, loss_of, mean_loss, without_targets
from dstrain.train.loss import asked_loss, computes_own_loss, targets_of
from dstrain.train.loss_trials import is_mean_of_logits, is_that_of_logits, sums_of, takes_targets, trial
from dstrain.train.optimizer_states import allocate_states
from dstrain.train.preflight.checks import Checks
from dstrain.train.rank import Rank
from dstrain.train.router_loss import RouterLoss
from dstrain.train.streaming import StreamingTrainer

_TRIED_TOKENS = 16
"""Tokens of the row on which the loss is tried."""
_PADDED = 9
"""Tokens of the row on which masks are tried, which has 7 of padding."""


class Trainer(StreamingTrainer):
    """The Trainer of one rank."""

    blank = staticmethod(without_targets)
    """Returns a row without targets, which fills up a rank's share of an evaluation."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        metrics: MetricsCallback,
        heartbeat: Sender,
        group: Any,
        checks: Checks | None = None,
        **options: Any,
    ) -> None:
        """`group`: gloo, of all ranks; None with one. `checks` precede the first step. `options`: WatchedTrainer's."""
        super().__init__(job=job, rank=rank, metrics=metrics, heartbeat=heartbeat, group=group, **options)
        self.remove_callback(transformers.PrinterCallback)
        self._has_masks = False  # whether packed rows need explicit masks, see `Trial`
        self._has_padding_masks = True  # whether padding needs them, see `sees_padding`
        self._checks = checks
        self._router_loss = RouterLoss(self.model, job, rank.world_size)
        if computes_own_loss(self.model):
            self.model_accepts_loss_kwargs = False  # see `_try_loss`
        self.num_shares = job.data_parallel(rank.world_size)
        """Ranks, or groups of ranks, that have micro-batches of their own."""
        self._share, index_in_group = divmod(rank.index, job.ranks_per_batch)
        self._counts_rows = index_in_group == 0  # the other ranks of the group have the same ones
        self.batch: Batch | None = None
        """The micro-batch that this rank works on."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of the model, without the token counts, which it notes with the shape."""
        counts = inputs.pop(COUNTS, Counts())
        rows, tokens = inputs["input_ids"].shape
        self.batch = Batch(rows=rows, tokens_per_row=tokens, samples=tuple(counts.samples))
        inputs = super()._prepare_inputs(inputs)
        if not self._has_padding_masks:
            inputs.pop("attention_mask", None)
        if self._has_masks:
            inputs["attention_mask"] = packed_masks(self.model, inputs["position_ids"])
        return inputs

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a micro-batch; the mean over the ranks, summed over a step, is that of its tokens."""
        inputs = {**inputs, **self._router_loss.arguments}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            loss = self._router_loss.weighed(loss, outputs, self.current_gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Any = None) -> RandomSampler:
        """Returns the sampler of an epoch, padded to whole steps with samples that are drawn again.

        Thus each step has the same samples on any number of ranks. Accelerate pads to a micro-batch of each rank.
        """
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.num_shares
        return RandomSampler(data, num_samples=math.ceil(len(data) / batch) * batch)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns the micro-batches of this rank, which come to the GPU one by one.

        Transformers reads all of a step before the first; accelerate would move them to the GPU, with their pixels.
        """
        batches: Any = super().get_train_dataloader()
        batches.device = None  # of accelerate's loader
        return batches  # type: ignore[no-any-return]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Returns the micro-batches of this rank; the ranks together evaluate every sample once."""
        rows, size = self.eval_dataset if eval_dataset is None else eval_dataset, self.args.per_device_eval_batch_size
        return DataLoader(
            Share(  # type: ignore[arg-type]
                rows=rows, index=self._share, count=self.num_shares, micro_batch=size, blank=self.blank
            ),
            batch_size=size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """Returns the mean loss per token over all ranks; Transformers' own loop averages over micro-batches."""
        engine: Any = self.model_wrapped
        engine.eval()

        def totals_of(batch: Mapping[str, Any]) -> torch.Tensor:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            with torch.no_grad(), self.compute_loss_context_manager():
                return self.totals(engine, batch)

        loss, targets = mean_loss(totals_of, dataloader, self._group)
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_tokens": targets}
        num_samples = len(dataloader.dataset.rows)
        return EvalLoopOutput(predictions=np.empty(0), label_ids=None, metrics=metrics, num_samples=num_samples)

    def totals(self, engine: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of a collated micro-batch: (2,), float64."""
        return self._totals(engine, self._prepare_inputs(dict(batch)))

    def _totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of this rank's micro-batch: (2,), float64."""
        if self._job.loss is LossKernel.FUSED:  # spares the logits
            return sums_of(engine, inputs)
        labels, shifted = inputs.pop("labels"), inputs.pop("shift_labels", None)
        return loss_of(engine(**inputs).logits, targets_of(labels, shifted))

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Trains; a checkpoint of another number of ranks is loaded from its universal copy."""
        self._is_universal = isinstance(resume_from_checkpoint, str) and checkpoints.reads_universal(
            Path(resume_from_checkpoint), world_size=self._rank.world_size
        )
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {**(config.get("checkpoint") or {}), "load_universal": self._is_universal}
        return super().train(resume_from_checkpoint, *arguments, **options)

    def _prepare_for_training(self, max_steps: int, batches: Any, resume_from_checkpoint: str | None) -> Any:
        """Returns the engine and its data. Raises InvalidConfig for a model that mixes the samples of a packed row,
        or whose loss cannot be shared by the ranks of a group.
        """
        prepared = super()._prepare_for_training(max_steps, batches, resume_from_checkpoint)
        allocate_states(self.model_wrapped)
        rows, size = self.first_rows, self.trial_size()
        if isinstance(rows, PackedRows):
            isolation = Trial(
                model=self.model,
                engine=self.model_wrapped,
                inputs_of=lambda row: self._prepare_inputs(self.data_collator([row] * size)),
                tokens=self._learned_tokens(),
                whole=self._whole_rows,
                group=self._group,
            )
            self._isolate(isolation)
        elif self._job.sp == 1:  # slices have none
            self._has_padding_masks = sees_padding(self.model_wrapped, self._tried_inputs(_PADDED, size), self._group)
            if self._has_padding_masks:
                self._rank.say("this model sees the padding behind a sample: attention gets a mask, which is slower")
        self._try_loss(size)
        self._complete_data(resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._compare_loss(Path(resume_from_checkpoint))
        if self._checks is not None:
            self._checks.run(self, prepared[1])
        return prepared

    def _compare_loss(self, checkpoint: Path) -> None:
        """Says how the loss of the loaded model differs from that with which it was saved. Raises RunFailed if far."""
        if NO_RESUME_CHECK in os.environ:
            return self._rank.say("note: --no-resume-check: the loss of the loaded model is not compared")
        known = resume_check.read(checkpoint, is_reader=self._rank.is_first, group=self._group)
        if known is None:
            text = f"note: {checkpoint.name} has no loss to compare that of the loaded model with"
        elif known.kind != (now := resume_check.kind_of(self._job)):
            text = f"note: the loss of the loaded model is not compared: {known.kind} before, {now} now"
        else:
            text = resume_check.verdict(checkpoint.name, known, self._known_loss(known.batches))
        return self._rank.say(text)

    def _add_to_checkpoint(self, folder: Path) -> None:
        """Writes the loss of the last micro-batch, which a resumed run computes again."""
        own = resume_check.own_batch(self._last_inputs) if self._last_inputs is not None else None
        if self.args.save_only_model:
            return
        batches = resume_check.of_first_group(own, self._job.sp, self._group)
        loss = self._known_loss(batches) if batches else None
        if loss is not None and self._rank.is_first:
            known = resume_check.Known(kind=resume_check.kind_of(self._job), batches=batches, loss=loss)
            resume_check.write(folder, known)

    def _known_loss(self, batches: Sequence[Mapping[str, Any]]) -> float | None:
        """Returns the loss of a micro-batch that all ranks share, without dropout; training is as if it were not."""
        batch, engine = self.batch, self.model_wrapped
        with trial(engine), self.compute_loss_context_manager():
            loss = resume_check.loss_on(
                batches,
                self._rank.index,
                lambda inputs: self._known_totals(engine, self._prepare_inputs(dict(inputs))),
                self._group,
            )
        self.batch = batch
        return loss

    def _known_totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and their number, (2,), float64, in as little memory as a step takes."""
        if self.model_accepts_loss_kwargs:
            return sums_of(engine, inputs)
        loss = engine(**inputs).loss.double()
        return torch.stack([loss, torch.ones_like(loss)])

    def _complete_data(self, checkpoint: str | None) -> None:
        """Adds to the data what the model itself says of them; here nothing."""

    def forget_losses(self) -> None:
        """Drops what losses outside of training left for the log; here nothing."""

    def _isolate(self, trial: Trial) -> None:
        """Chooses how the samples of a row are kept apart; those of slices are attended one by one already."""
        has_choice = self._job.attn == Attention.SDPA and self._job.sp == 1
        if has_choice and trial.works_by_sample():
            return
        self._has_masks = trial.needs_masks()
        if has_choice:
            self._rank.say("attention over packed rows gets a mask in this model, which is slower")

    def _tried_inputs(self, num_tokens: int, size: int) -> dict[str, Any]:
        """Returns a micro-batch of so many tokens: the first ones with loss, again and again if there are fewer."""
        tokens = np.resize(self._learned_tokens(), num_tokens)
        row = row_of(tokens, tokens, np.array([len(tokens)]))
        return self._prepare_inputs(self.data_collator([row] * size))

    def _learned_tokens(self) -> Any:
        """Returns the tokens with loss of the first row, (tokens,), none of which belongs to an image."""
        labels = np.asarray(self.first_rows[0]["labels"])
        return labels[labels != IGNORED]

    def _try_loss(self, size: int) -> None:
        """Raises InvalidConfig for a loss that ranks of a group cannot share, or whose head does not make logits."""
        job, engine = self._job, self.model_wrapped
        is_fused = job.loss is LossKernel.FUSED
        if self.model_accepts_loss_kwargs and not is_fused:
            return
        inputs = self._tried_inputs(_TRIED_TOKENS, size)
        if not self.model_accepts_loss_kwargs:
            self.model_accepts_loss_kwargs = takes_targets(engine, inputs)
        name = type(without_adapter(self.model)).__name__
        if not self.model_accepts_loss_kwargs and (job.ranks_per_batch > 1 or is_fused):
            key, cure = ("sp", 1) if job.sp > 1 else ("tp", 1) if job.tp > 1 else ("loss", LossKernel.CHUNKED)
            problem = f"the loss of {name} does not take shifted labels and token counts"
            raise InvalidConfig(f"{key} is {getattr(job, key)}, but {problem}", hint=f"{key}: {cure}")
        if not self.model_accepts_loss_kwargs:
            self._replace_mean(name, inputs)
        if is_fused and not is_that_of_logits(engine, inputs):
            problem = f"{name} changes its logits between head and loss"
            raise InvalidConfig(f"loss is fused, but {problem}", hint="loss: chunked")

    def _replace_mean(self, name: str, inputs: dict[str, Any]) -> None:
        """Asks for the mean over the tokens of a step in the place of a model, if its loss is that of a micro-batch."""
        if is_mean_of_logits(self.model_wrapped, inputs):
            self.compute_loss_func = asked_loss(self.model)
            self._rank.say(
                f"{name} takes the mean of each micro-batch; its loss is computed over the tokens of a step instead"
            )
        else:
            self._rank.say(f"{name} has a loss of its own: that of a step is a mean of micro-batches, not of tokens")

    def trial_size(self) -> int:
        """Returns the rows of the micro-batch on which the loss and isolation are tried."""
        return min(self.args.per_device_train_batch_size, 2)

    def _whole_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, seq, vocab) of whole rows."""
        return logits

    def create_scheduler(self, *arguments: Any, **options: Any) -> Any:
        """Returns the schedule of the learning rate, and remembers the rates of the job."""
        scheduler = super().create_scheduler(*arguments, **options)
        self._rates = list(getattr(_inner(self.lr_scheduler), "base_lrs", ()))
        return scheduler

    def _take_rates(self) -> None:
        """Continues with the job's learning rate, in place of that of the checkpoint, which its schedule brings along.

        Source: torch 2.13 optim/lr_scheduler.py: LambdaLR.load_state_dict
        """
        scheduler: Any = _inner(self.lr_scheduler)
        saved = list(getattr(scheduler, "base_lrs", ()))
        if saved == self._rates or len(saved) != len(self._rates) or not hasattr(scheduler, "lr_lambdas"):
            return
        scheduler.base_lrs = self._rates
        optimizer: Any = self.optimizer
        for group, rate, share in zip(optimizer.param_groups, self._rates, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * share(scheduler.last_epoch)
        rates = f"learning_rate {max(self._rates):g} in place of {max(saved):g}"
        self._rank.say(f"{rates}, with which the checkpoint was trained")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the remaining states, and repairs those that DeepSpeed loads wrongly from a universal copy."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._take_rates()
        if self._is_universal:
            engine: Any = self.model_wrapped
            universal_checkpoint.mend(engine.optimizer.optimizer)

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        """Trains for an epoch; a run that is resumed at its last step takes no extra step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **options)  # type: ignore[no-untyped-call]


def _inner(scheduler: Any) -> Any:
    """Returns the schedule itself of what accelerate wraps."""
    return getattr(scheduler, "scheduler", scheduler)
