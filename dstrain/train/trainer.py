"""Transformers' Trainer with complete checkpoints, exact resuming, and consistent metrics."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, RandomSampler
from transformers.trainer_utils import EvalLoopOutput

from dstrain.heartbeat import Phase, Sender
from dstrain.job.schema import Job
from dstrain.monitor.callback import COUNTS, Meter, MetricsCallback
from dstrain.monitor.health import Nonfinite
from dstrain.paths import flush
from dstrain.rundir import RunDir, rotate
from dstrain.train import rope_scaling
from dstrain.train.arguments import zero_stage
from dstrain.train.checkpoints import checkpoints, saved_model, universal_checkpoint
from dstrain.train.checkpoints.checkpoints import Written
from dstrain.train.checkpoints.node_storage import Disk
from dstrain.train.data.isolation import Trial, packed_masks
from dstrain.train.data.packing import PackedRows
from dstrain.train.evaluation import Share, mean_loss
from dstrain.train.rank import Rank


class Trainer(transformers.Trainer):
    """The Trainer of one rank."""

    def __init__(
        self,
        *,
        job: Job,
        run_dir: RunDir,
        rank: Rank,
        disk: Disk,
        metrics: MetricsCallback,
        heartbeat: Sender,
        base: Mapping[str, Any],
        group: Any,
        data_digest: str,
        **options: Any,
    ) -> None:
        """`base` is the configuration of the base model, `group` a gloo group of all ranks or None with one rank,
        `options` are those of Transformers' Trainer."""
        super().__init__(**options, callbacks=[metrics])
        self.remove_callback(transformers.PrinterCallback)
        self._job = job
        self._run_dir = run_dir
        self._rank = rank
        self._disk = disk
        self._has_masks = False  # whether packed rows need explicit masks, see `Trial`
        self._gradients = Nonfinite("gradients", limit=job.stop_on_nonfinite)
        self._losses = Nonfinite("losses", limit=job.stop_on_nonfinite)
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._base = base
        self._group = group
        self._data_digest = data_digest
        self._stage = zero_stage(self.args.hf_deepspeed_config.config)

    @property
    def meter(self) -> Meter:
        """The meter of this rank."""
        return self._metrics.meter

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of one step, and counts their tokens and the waiting time."""
        batches, items = super().get_batch_samples(self.meter.timed(epoch_iterator), num_batches, device)
        for batch in batches:
            self.meter.count(batch)
        return batches, items

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of the model, without the token counts of an evaluation batch."""
        inputs.pop(COUNTS, None)
        inputs = super()._prepare_inputs(inputs)
        if self._has_masks:
            inputs["attention_mask"] = packed_masks(self.model, inputs["position_ids"])
        return inputs

    def _get_train_sampler(self, train_dataset: Any = None) -> RandomSampler:
        """Returns the sampler of an epoch, padded to whole steps with samples that are drawn again.

        Thus each step has the same samples on any number of ranks. Accelerate pads as well, but to one micro-batch per
        rank, and with the first samples of the epoch.
        """
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self._rank.world_size
        return RandomSampler(data, num_samples=math.ceil(len(data) / batch) * batch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Returns the micro-batches of this rank; the ranks together evaluate every sample once."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        return DataLoader(
            Share(rows=rows, rank=self._rank),  # type: ignore[arg-type]
            batch_size=self.args.per_device_eval_batch_size,
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

        def logits_of(batch: Mapping[str, Any]) -> torch.Tensor:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            with torch.no_grad(), self.compute_loss_context_manager():
                logits: torch.Tensor = engine(**self._prepare_inputs(dict(batch))).logits
            return logits

        loss, targets = mean_loss(logits_of, dataloader, self._group)
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_tokens": targets}
        num_samples = len(dataloader.dataset.rows)
        return EvalLoopOutput(predictions=np.empty(0), label_ids=None, metrics=metrics, num_samples=num_samples)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs together with the metrics of the window, so that trainer_state.json, sinks and metrics.jsonl agree."""
        if "loss" in logs:
            logs.update(self._metrics.drain())
        super().log(logs, start_time)
        if "loss" in logs and "grad_norm" not in logs:  # the engine has no norm without ZeRO and with fp32
            self._losses.note(self.state.global_step, is_finite=math.isfinite(logs["loss"]))

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Trains; a checkpoint of another number of ranks is loaded from its universal copy."""
        self._is_universal = isinstance(resume_from_checkpoint, str) and checkpoints.reads_universal(
            Path(resume_from_checkpoint), world_size=self._rank.world_size
        )
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {**(config.get("checkpoint") or {}), "load_universal": self._is_universal}
        return super().train(resume_from_checkpoint, *arguments, **options)

    def _prepare_for_training(self, *arguments: Any, **options: Any) -> Any:
        """Returns the engine and its data. Raises InvalidConfig if the model mixes the samples of a packed row."""
        prepared = super()._prepare_for_training(*arguments, **options)  # type: ignore[no-untyped-call]
        self._skipped = self.skipped_steps
        rows: Any = self.train_dataset
        if isinstance(rows, PackedRows):
            size = min(self.args.per_device_train_batch_size, 2)
            self._has_masks = Trial(
                model=self.model,
                engine=self.model_wrapped,
                inputs_of=lambda row: self._prepare_inputs(self.data_collator([row] * size)),
                tokens=rows[0]["input_ids"],
                group=self._group,
            ).needs_masks()
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the remaining states, and repairs those that DeepSpeed loads wrongly from a universal copy."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._is_universal:
            engine: Any = self.model_wrapped
            universal_checkpoint.mend(engine.optimizer.optimizer)

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        """Trains for an epoch; a run that is resumed at its last step takes no extra step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **options)  # type: ignore[no-untyped-call]

    @property
    def skipped_steps(self) -> int:
        """Steps that DeepSpeed has skipped since training began, because their gradients were not finite."""
        engine: Any = self.model_wrapped
        return int(engine.skipped_steps)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *arguments: Any, **options: Any) -> None:
        """Logs, saves and evaluates; the time of a checkpoint or an evaluation does not count in the metrics.

        Raises RunFailed after too many consecutive steps without finite gradients; all ranks have the same norm.
        """
        skipped, self._skipped = self._skipped, self.skipped_steps
        is_finite = skipped == self._skipped and (grad_norm is None or math.isfinite(grad_norm))
        self._gradients.note(self.state.global_step, is_finite=is_finite)
        is_long = self.control.should_evaluate or self.control.should_save
        if is_long:
            self._heartbeat.send(
                self.state.global_step, Phase.EVALUATING if self.control.should_evaluate else Phase.SAVING
            )
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **options)
        if is_long:
            self.meter.restart()
            self._heartbeat.send(self.state.global_step, Phase.STEP)

    def _written(self) -> Written:
        return Written(
            step=self.state.global_step,
            world_size=self._rank.world_size,
            zero_stage=self._stage,
            micro_batch=self.args.per_device_train_batch_size,
            grad_accum=self.args.gradient_accumulation_steps,
            data=self._data_digest,
            rope_scaling=self._job.rope_scaling,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint; rank 0 marks it as complete after all ranks have written their parts."""
        folder = self._run_dir.path / f"checkpoint-{self.state.global_step}"
        if self._rank.index == self._disk.ranks[0]:
            checkpoints.begin(folder)
        self._wait()
        super()._save_checkpoint(model, trial)
        self._wait()
        if self._rank.local_index == 0:
            flush(folder)
        self._wait()
        if self._disk.is_apart:
            self._mark_part(folder)
        elif self._rank.is_first:
            checkpoints.complete(folder, self._written())
            rotate(self._run_dir, self._job.save_total_limit)

    def _mark_part(self, folder: Path) -> None:
        """Marks the part on each disk, rank 0's last: then `dstrain run` may gather all parts."""
        for is_turn in (not self._rank.is_first, self._rank.is_first):
            if is_turn and self._rank.index == self._disk.ranks[0]:
                of_ranks = len(self._disk.ranks)
                checkpoints.complete_part(folder, self._written(), of_ranks=of_ranks, start=self._disk.start)
            self._wait()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves weights for `from_pretrained`; under ZeRO-3 only if the configuration allows gathering them."""
        if self._can_gather():
            super().save_model(output_dir, _internal_call)
        elif self._rank.is_first:
            # Transformers would save the whole sharded state here, and later again
            folder = str(output_dir or self.args.output_dir)
            model: Any = self.model
            tokenizer: Any = self.processing_class
            model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            saved_model.restore_config(Path(folder), self._base)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights in the dtype of the base model, and config.json with the base's values."""
        dtype = saved_model.base_dtype(self._base)
        model: Any = self.model
        if self.args.should_save and state_dict and not self._is_adapter():
            state_dict = saved_model.without_copies(state_dict, model)
            if dtype is not None:
                state_dict = saved_model.converted(state_dict, model, model.dtype, dtype)
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            saved_model.restore_config(folder, self._base)
            rope_scaling.write_beside_adapter(folder, self._job)

    def _is_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _can_gather(self) -> bool:
        if self._stage != 3 or self._is_adapter():
            return True
        engine: Any = self.model_wrapped
        return bool(engine.zero_gather_16bit_weights_on_model_save())

    def save_final(self) -> Path | None:
        """Saves the trained model or adapter and its tokenizer; returns the folder, or None if weights stay sharded.

        Raises RunFailed on rank 0 if the saved model is incomplete.
        """
        final = self._run_dir.final
        if not self._can_gather():
            self._rank.say(
                "stage3_gather_16bit_weights_on_model_save is false, so the final model is not gathered; "
                f"to get it: python -m dstrain.train.checkpoints.export {self._run_dir.path} OUT"
            )
            return None
        if self._rank.is_first and final.exists():
            shutil.rmtree(final)
        self._wait()
        self.save_model(str(final))
        if self._rank.is_first:
            (final / "training_args.bin").unlink(missing_ok=True)  # a pickle with this machine's paths
        self._wait()
        if self._rank.is_first and self._is_adapter():
            saved_model.require_whole_adapter(final, self.model)
        elif self._rank.is_first:
            saved_model.require_whole_model(final, trust_remote_code=self._job.trust_remote_code)
        return final

    def _wait(self) -> None:
        if dist.is_initialized() and self._rank.world_size > 1:
            dist.barrier()
