"""The Trainer of a rank: Transformers' loop, with parts that save, measure, read a stream, and know loss and ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, RandomSampler
from transformers.trainer_utils import EvalLoopOutput, seed_worker

from dstrain.choices import Attention
from dstrain.heartbeat import NO_RESUME_CHECK, Sender
from dstrain.job.schema import Job
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.meter import COUNTS, Counts, Meter
from dstrain.oom import Batch
from dstrain.rundir import RunDir
from dstrain.train.checkpoints import checkpoints, resume_check, universal_checkpoint
from dstrain.train.checkpoints.checkpoints import Disk
from dstrain.train.data.collate import PackedRows
from dstrain.train.data.isolation import Trial, packed_masks, sees_padding
from dstrain.train.data.stream import Stream, StreamProgress
from dstrain.train.loss import Share, trial
from dstrain.train.memory import allocate_states
from dstrain.train.parts.objective import Objective
from dstrain.train.parts.parallel import Alone
from dstrain.train.parts.saving import Saver
from dstrain.train.parts.step_watch import StepWatch
from dstrain.train.preflight.checks import Checks
from dstrain.train.rank import Rank

_PADDED = 9
"""Tokens of the row on which masks are tried, which has 7 of padding."""


class Trainer(transformers.Trainer):
    """The Trainer of one rank.

    It overrides three private methods of Transformers that have no public counterpart: `_prepare_for_training`,
    `_maybe_log_save_evaluate` and `_save_checkpoint`.
    """

    def __init__(
        self,
        *,
        job: Job,
        run_dir: RunDir,
        rank: Rank,
        disk: Disk,
        group: Any,
        heartbeat: Sender,
        metrics: MetricsCallback,
        base: Mapping[str, Any],
        data_digest: str,
        data_collator: Any,
        objective: Objective,
        parallel: Alone,
        checks: Checks | None = None,
        extra_files: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        """`group`: gloo, of all ranks; None with one. `checks` precede the first step. `base` and `extra_files`: see
        `Saver`. `data_collator` makes whole rows. Transformers' Trainer takes `options`.
        """
        super().__init__(data_collator=parallel.collator(data_collator), callbacks=[metrics], **options)
        self.job, self.run_dir, self.rank, self.disk = job, run_dir, rank, disk
        self.group, self.heartbeat = group, heartbeat
        self.num_shares = job.data_parallel(rank.world_size)
        self.share, index_in_group = divmod(rank.index, job.ranks_per_batch)
        self.batch: Batch | None = None
        self._metrics, self._checks = metrics, checks
        self._has_masks = False  # whether packed rows need explicit masks, see `Trial`
        self._has_padding_masks = True  # whether padding needs them, see `sees_padding`
        self._parallel, self._objective = parallel, objective
        parallel.attach(self)
        self.watch = StepWatch(self, metrics, counts_rows=index_in_group == 0)
        saving = parallel.saving
        self.saver = Saver(self, base=base, data_digest=data_digest, extra_files=extra_files, within=saving)
        self._stream = self._progress_of(data_digest)
        self.remove_callback(transformers.PrinterCallback)
        objective.attach(self, parallel)

    def _progress_of(self, digest: str) -> StreamProgress | None:
        """Returns the progress of this rank in a stream; None for other data, which Transformers reads."""
        data: Any = self.train_dataset
        if not isinstance(data, Stream):
            return None
        ranks = {"rank": self.rank.index, "num_ranks": self.rank.world_size}
        return StreamProgress(data, digest, **ranks, workers=self.args.dataloader_num_workers)

    @property
    def meter(self) -> Meter:
        """The meter of this rank."""
        return self._metrics.meter

    @property
    def first_rows(self) -> Any:
        """Rows on which the model is tried: all data, or the first rows of a stream."""
        data: Any = self.train_dataset
        return data.first_rows if isinstance(data, Stream) else data

    @property
    def is_adapter(self) -> bool:
        """Whether the model has adapters."""
        return hasattr(self.model, "peft_config")

    def trial_size(self) -> int:
        """Returns the rows of the micro-batch on which the loss and isolation are tried."""
        return self._parallel.trial_size()

    def wait(self) -> None:
        """Waits for all ranks."""
        if dist.is_initialized() and self.rank.world_size > 1:
            dist.barrier()

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns the micro-batches of this rank, which come to the GPU one by one.

        Transformers reads all of a step before the first; accelerate would move them to the GPU, with their pixels.
        Those that a stream yields have no end, so that all ranks have as many.
        """
        data: Any = self.train_dataset
        options: dict[str, Any] = {
            "batch_size": self.args.per_device_train_batch_size,
            "collate_fn": self.data_collator,
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory,
        }
        if self._stream is not None:  # from PyTorch's own generator a resumed run would draw a number more
            return DataLoader(data, generator=torch.Generator(), **options)
        workers = {"num_workers": self.args.dataloader_num_workers, "rank": self.args.process_index}
        options |= {"sampler": self._sampler(data), "worker_init_fn": partial(seed_worker, **workers)}
        batches: Any = self.accelerator.prepare(DataLoader(data, **options))
        batches.device = None
        return self._parallel.shard(batches)  # type: ignore[no-any-return]

    def _sampler(self, data: Any) -> RandomSampler:
        """Returns the sampler of an epoch, padded to whole steps with samples that are drawn again.

        Thus each step has the same samples on any number of ranks. Accelerate pads to a micro-batch of each rank.
        """
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.num_shares
        return RandomSampler(data, num_samples=math.ceil(len(data) / batch) * batch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Returns the micro-batches of this rank; the ranks together evaluate every sample once."""
        rows, size = self.eval_dataset if eval_dataset is None else eval_dataset, self.args.per_device_eval_batch_size
        share: Any = Share(
            rows=rows, index=self.share, count=self.num_shares, micro_batch=size, blank=self._objective.blank
        )
        return DataLoader(
            share,
            batch_size=size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def get_sp_size(self) -> int:
        """Returns 1: Transformers multiplies the micro-batches of a data loader by it, and divides their tokens."""
        return 1

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Returns the samples of one step."""
        return self._parallel.total_batch(super().get_total_train_batch_size(args))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of one step, counts their tokens, and notes how far they are in a stream.

        A run that is resumed at its last step takes no extra step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        batches = epoch_iterator if self._stream is None else self._stream.noted(epoch_iterator)
        found, items = super().get_batch_samples(self.watch.begin_step(batches), num_batches, device)
        self.watch.count(found)
        return found, items

    # ---- passes ----

    def _plain(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a collated micro-batch without token counts and needless masks, and notes its shape."""
        counts = inputs.pop(COUNTS, Counts())
        rows, tokens = inputs["input_ids"].shape
        self.batch = Batch(rows=rows, tokens_per_row=tokens, samples=tuple(counts.samples))
        if not self._has_padding_masks:
            inputs.pop("attention_mask", None)
        return self._objective.whole(inputs)

    def _masked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns inputs on the device, with the masks that packed rows need."""
        if not self._has_masks or "attention_mask" in inputs:
            return inputs
        return {**inputs, "attention_mask": packed_masks(self.model, inputs["position_ids"])}

    def inputs_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs of the model for a collated micro-batch, on its device."""
        inputs: dict[str, Any] = self._prepare_inputs(self._plain(dict(batch)))
        return self._masked(inputs)

    def items_in(self, batch: dict[str, Any]) -> Any:
        """Returns the tokens with loss in a collated micro-batch of each rank, on all ranks."""
        return self._get_num_items_in_batch([batch], self.args.device)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Returns the loss of a micro-batch after its backward pass."""
        tokens, labels = inputs["input_ids"], inputs.get("labels")
        self.watch.begin_pass(inputs)
        loss = super().training_step(model, self._plain(inputs), num_items_in_batch)
        self.watch.end_pass(loss, tokens, labels)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a micro-batch, and times the forward pass."""
        own = super().compute_loss
        loss, outputs = self._objective.loss(model, self._masked(inputs), num_items_in_batch, own)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """Returns the mean loss over all ranks, of tokens or of pairs, with other figures of the objective."""
        engine: Any = self.model_wrapped
        engine.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            figures = self._objective.evaluated(engine, self._evaluated_inputs(dataloader))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        num_samples = len(dataloader.dataset.rows)
        return EvalLoopOutput(predictions=np.empty(0), label_ids=None, metrics=metrics, num_samples=num_samples)

    def _evaluated_inputs(self, batches: Any) -> Iterator[dict[str, Any]]:
        for batch in batches:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            yield self.inputs_of(batch)

    def totals(self, engine: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of a collated micro-batch: (2,), float64."""
        return self._objective.totals(engine, self.inputs_of(batch))

    def forget_losses(self) -> None:
        """Drops what losses outside of training left for the log."""
        self._objective.forget()

    # ---- the beginning ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Trains; a checkpoint of another number of ranks is loaded from its universal copy.

        A stream continues from the checkpoint, and the log ends with the samples read.
        """
        checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        self._is_universal = checkpoint is not None and checkpoints.reads_universal(
            checkpoint, world_size=self.rank.world_size
        )
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {**(config.get("checkpoint") or {}), "load_universal": self._is_universal}
        if self._stream is not None and checkpoint is not None:
            note = self._stream.restore(checkpoint)
            if note is not None:
                self.rank.say(f"note: {note}")
        output = super().train(resume_from_checkpoint, *arguments, **options)
        self._say_read()
        return output

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Returns the optimizer, whose groups of parameters may belong to some ranks."""
        optimizer = super().create_optimizer(*arguments, **options)
        self._parallel.part(optimizer)
        return optimizer

    def create_scheduler(self, *arguments: Any, **options: Any) -> Any:
        """Returns the schedule of the learning rate, and remembers the rates of the job."""
        scheduler = super().create_scheduler(*arguments, **options)
        self._rates = list(getattr(_inner(self.lr_scheduler), "base_lrs", ()))
        return scheduler

    def _prepare_for_training(self, max_steps: int, batches: Any, resume_from_checkpoint: str | None) -> Any:
        """Returns the engine and its data. Raises InvalidConfig for a model that mixes the samples of a packed row,
        or whose loss cannot be shared by the ranks of a group.
        """
        self._began_at = self.state.global_step
        self._parallel.begin()
        prepared = super()._prepare_for_training(max_steps, batches, resume_from_checkpoint)  # type: ignore[no-untyped-call]
        if resume_from_checkpoint is not None:
            self._take_rates()
            if self._is_universal:  # repairs states that DeepSpeed loads wrongly
                engine: Any = self.model_wrapped
                universal_checkpoint.mend(engine.optimizer.optimizer)
        self.watch.begin()
        allocate_states(self.model_wrapped)
        self._try_masks(self.trial_size())
        self._objective.try_loss()
        self._objective.complete_data(resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._compare_loss(Path(resume_from_checkpoint))
        if self._checks is not None:
            self._checks.run(self, prepared[1])
        return prepared

    def _take_rates(self) -> None:
        """Continues with the job's learning rate, in place of the rate that the checkpoint's schedule brings along.

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
        self.rank.say(f"{rates}, with which the checkpoint was trained")

    def _try_masks(self, size: int) -> None:
        """Chooses how the samples of a packed row are kept apart, or whether padding needs a mask."""
        if isinstance(self.first_rows, PackedRows):
            self._isolate(
                Trial(
                    model=self.model,
                    engine=self.model_wrapped,
                    inputs_of=lambda row: self.inputs_of(self.data_collator([row] * size)),
                    tokens=self._objective.learned_tokens(),
                    whole=self._parallel.whole_rows,
                    group=self.group,
                )
            )
        elif self.job.sp == 1:  # slices have no padding mask
            tried = self._objective.tried(_PADDED, size)
            self._has_padding_masks = sees_padding(self.model_wrapped, tried, self.group)
            if self._has_padding_masks:
                self.rank.say("this model sees the padding behind a sample: attention gets a mask, which is slower")

    def _isolate(self, isolation: Trial) -> None:
        """Chooses how the samples of a row are kept apart; slices attend to them one by one already."""
        has_choice = self.job.attn == Attention.SDPA and self.job.sp == 1
        if has_choice and isolation.works_by_sample():
            return
        self._has_masks = isolation.needs_masks()
        if has_choice:
            self.rank.say("attention over packed rows gets a mask in this model, which is slower")

    # ---- the loss that a checkpoint knows ----

    def _compare_loss(self, checkpoint: Path) -> None:
        """Says how the loss of the loaded model differs from that with which it was saved. Raises RunFailed if far."""
        if NO_RESUME_CHECK in os.environ:
            return self.rank.say("note: --no-resume-check: the loss of the loaded model is not compared")
        known = resume_check.read(checkpoint, is_reader=self.rank.is_first, group=self.group)
        if known is None:
            text = f"note: {checkpoint.name} has no loss to compare that of the loaded model with"
        elif known.kind != (now := resume_check.kind_of(self.job)):
            text = f"note: the loss of the loaded model is not compared: {known.kind} before, {now} now"
        else:
            text = resume_check.verdict(checkpoint.name, known, self._known_loss(known.batches))
        return self.rank.say(text)

    def _write_known_loss(self, folder: Path) -> None:
        """Writes the loss of the last micro-batch, which a resumed run computes again."""
        last = self.watch.last_inputs
        own = resume_check.own_batch(last) if last is not None else None
        if self.args.save_only_model:
            return
        batches = resume_check.of_first_group(own, self.job.sp, self.group)
        loss = self._known_loss(batches) if batches else None
        if loss is not None and self.rank.is_first:
            known = resume_check.Known(kind=resume_check.kind_of(self.job), batches=batches, loss=loss)
            resume_check.write(folder, known)

    def _known_loss(self, batches: Sequence[Mapping[str, Any]]) -> float | None:
        """Returns the loss of a micro-batch that all ranks share, without dropout; training is as if it were not."""
        batch, engine = self.batch, self.model_wrapped
        with trial(engine), self.compute_loss_context_manager():
            loss = resume_check.loss_on(
                batches,
                self.rank.index,
                lambda inputs: self._objective.known_totals(engine, self.inputs_of(inputs)),
                self.group,
            )
        self.batch = batch
        return loss

    # ---- between steps ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs together with the figures of the objective and the metrics of the window."""
        is_window = "loss" in logs
        if is_window:
            logs.update(self._objective.figures())
            self.watch.complete(logs)
        super().log(logs, start_time)
        if is_window:
            self.watch.note_loss(logs)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *arguments: Any, **options: Any) -> None:
        """Logs, saves and evaluates.

        Transformers subtracts a logged loss from itself to begin anew, which leaves NaN for ever after one that is NaN.
        Raises RunFailed after too many consecutive steps without finite gradients.
        """
        if self.state.global_step == self._began_at:  # resumed at its last step
            return
        if self._stream is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps  # Transformers' begins anew with a resume
        self.watch.note_gradients(grad_norm)
        is_logged, is_saved = self.control.should_log, self.control.should_save
        with self.watch.between_steps(evaluates=self.control.should_evaluate, saves=is_saved):
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **options)
            if is_logged:
                tr_loss.zero_()
        if is_saved and self.state.global_step < self.state.max_steps:
            self._say_read()

    def _say_read(self) -> None:
        """Logs what all ranks have read of a stream."""
        for line in self._stream.report(self.group, self.job) if self._stream is not None else ():
            self.rank.say(line)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a complete checkpoint, and takes its time."""
        of_transformers = super()._save_checkpoint

        def write(folder: Path) -> None:
            of_transformers(model, trial)
            if self._stream is not None and not self.args.save_only_model:
                self._stream.save(folder)
            self._write_known_loss(folder)

        with self.watch.saving():
            self.saver.checkpoint(write)

    def write_parts(self, folder: str) -> None:
        """Writes the contents of a checkpoint, without marking it as one; all ranks run it together."""
        with self.saver.reading_back(Path(folder)):
            self.save_model(folder, _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(folder)
                self._save_rng_state(folder)
                if self._stream is not None:
                    self._stream.save(Path(folder))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves weights for `from_pretrained`; shared ones only where the configuration allows gathering them."""
        self.saver.model(Path(output_dir or str(self.args.output_dir)))


def _inner(scheduler: Any) -> Any:
    """Returns the schedule itself of what accelerate wraps."""
    return getattr(scheduler, "scheduler", scheduler)
