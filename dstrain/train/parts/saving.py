"""Writes checkpoints and the final model, and leaves with a checkpoint on request: a part of the Trainer."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from dstrain.choices import Method
from dstrain.config.resolve_auto import GATHERS
from dstrain.errors import InvalidConfig, RunFailed
from dstrain.facts.ds_config import ZERO, section, zero_stage
from dstrain.heartbeat import Phase, Sender
from dstrain.job.schema import Job
from dstrain.monitor.health.nonfinite import AGAIN
from dstrain.monitor.outcomes import BestModel
from dstrain.paths import flush
from dstrain.rundir import file_sizes, is_whole, rotate
from dstrain.train import adapters
from dstrain.train.checkpoints import checkpoints, saved_model
from dstrain.train.checkpoints.checkpoints import Written, checksum, recorded
from dstrain.train.checkpoints.tensor_files import nonfinite_states, nonfinite_weights, reading_back
from dstrain.train.parts.training import Training
from dstrain.train.rank import Leaving, of_all_ranks

_STATES = (
    *("global_step*", "latest*", "zero_to_*.py", "*.pt", "*.pth", "stream-*.json"),
    *("trainer_state.json", "training_args.bin", "complete.json", "part.json", ".*"),
)
"""Files and folders of a checkpoint that are not of its model."""


class BestModelCallback(EarlyStoppingCallback):
    """Transformers' early stopping, whose count of evaluations without a lower loss continues after a resume."""

    def __init__(self, job: Job) -> None:
        """Without `early_stopping`, any number of such evaluations is allowed."""
        self.patience = job.early_stopping
        super().__init__(job.early_stopping or sys.maxsize, job.early_stopping_threshold)
        self._began_at = 0

    def state(self) -> dict[str, Any]:
        """Returns the count for a checkpoint; the job, which may have changed at a resume, has the limits."""
        return {"args": {}, "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the count of the checkpoint that training resumes from; a checkpoint without one begins at 0."""
        states: Any = state.stateful_callbacks
        known = states.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = known["attributes"]["early_stopping_patience_counter"]
        self._began_at = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluates the last step, too: Transformers writes a checkpoint of it."""
        if args.eval_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(  # type: ignore[override]  # its two bases have different signatures
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts an evaluation, but not `eval_on_start`, which repeats an earlier one, or has nothing before it."""
        if state.global_step > self._began_at:
            super().on_evaluate(args, state, control, **kwargs)  # type: ignore[no-untyped-call]

    def outcome(self, state: TrainerState) -> BestModel | None:
        """Returns the best model, and whether training stopped early; None if no evaluation had a loss."""
        if state.best_global_step is None or state.best_metric is None:
            return None
        is_early = self.early_stopping_patience_counter >= self.early_stopping_patience
        stopped_at = state.global_step if is_early and state.global_step < state.max_steps else None
        evaluations = self.patience if stopped_at is not None else None
        best: dict[str, Any] = {"step": int(state.best_global_step), "loss": float(state.best_metric)}
        return BestModel(**best, stopped_at=stopped_at, evaluations=evaluations)


def copy_model(checkpoint: Path, to: Path) -> None:
    """Copies the model of a checkpoint, as it was saved, without the states of training."""
    shutil.copytree(checkpoint, to, ignore=shutil.ignore_patterns(*_STATES))


def require_weights(job: Job, ds_config: Mapping[str, Any]) -> None:
    """Raises InvalidConfig for checkpoints of the weights alone under a ZeRO-3 that does not gather them."""
    gathers = section(ds_config, ZERO).get(GATHERS)
    if job.save_only_model and job.method is Method.FULL and zero_stage(ds_config) == 3 and not gathers:
        problem = f"save_only_model is true, but {GATHERS} is not, so that checkpoints would have no weights"
        raise InvalidConfig(problem, hint=f'Write "{GATHERS}": true into zero_optimization.')


_SHOWN_NAMES = 5
"""Names in an error; more are counted."""


class Saver:
    """Writes the checkpoints and the final model of a rank."""

    def __init__(
        self,
        trainer: Training,
        *,
        base: Mapping[str, Any],
        data_digest: str,
        extra_files: Sequence[Path] = (),
        within: Callable[[Mapping[str, Any]], AbstractContextManager[None]] = lambda weights: nullcontext(),
    ) -> None:
        """`base` is the configuration of the base model, `extra_files` belong to its processor, which go with each
        saved model; gathered weights are saved `within` a context. Raises InvalidConfig if disks of nodes would keep
        the best checkpoint.
        """
        self._trainer = trainer
        self._base = base
        self._data_digest = data_digest
        self._extra_files = extra_files
        self._within = within
        self._stage = zero_stage(trainer.args.hf_deepspeed_config.config)
        self._best = BestModelCallback(trainer.job) if trainer.job.keeps_best else None
        if self._best is not None:
            if trainer.disk.is_apart:
                problem = "the best checkpoint stays on a disk that all nodes share, but these have disks of their own"
                raise InvalidConfig(problem, hint="load_best: false, without early_stopping")
            trainer.add_callback(self._best)

    @property
    def best_model(self) -> BestModel | None:
        """The model of the lowest evaluation loss; None if the job does not keep it, or no evaluation had a loss."""
        return self._best.outcome(self._trainer.state) if self._best is not None else None

    def _written(self, checksums: Mapping[str, str]) -> Written:
        return Written(
            step=self._trainer.state.global_step,
            world_size=self._trainer.rank.world_size,
            zero_stage=self._stage,
            micro_batch=self._trainer.args.per_device_train_batch_size,
            grad_accum=self._trainer.args.gradient_accumulation_steps,
            sp=self._trainer.job.sp,
            tp=self._trainer.job.tp,
            ep=self._trainer.job.ep,
            optimizer=self._trainer.job.optimizer,
            data=self._data_digest,
            rope_scaling=self._trainer.job.rope_scaling,
            attn=self._trainer.job.attn,
            only_model=self._trainer.args.save_only_model,
            checksums=checksums,
        )

    def checkpoint(self, write: Callable[[Path], None]) -> None:
        """Writes a checkpoint by `write`; rank 0 marks it as complete after all ranks have written their parts.

        Raises RunFailed for weights or states that are not finite, and for files that hold something else.
        """
        trainer = self._trainer
        folder = trainer.run_dir.path / f"checkpoint-{trainer.state.global_step}"
        self._require_finite()
        if trainer.rank.index == trainer.disk.ranks[0]:
            checkpoints.begin(folder)
        trainer.wait()
        with self.reading_back(folder) as checksums:
            write(folder)
        trainer.wait()
        if trainer.rank.local_index == 0:
            flush(folder)
        trainer.wait()
        if trainer.disk.is_apart:
            self._mark_part(folder, self._written(checksums))
        elif trainer.rank.is_first:
            checkpoints.complete(folder, self._written(checksums))
            rotate(trainer.run_dir, trainer.job.save_total_limit)

    def _require_finite(self) -> None:
        """Raises RunFailed, on all ranks, if a weight or a state of the optimizer is not finite on any of them."""
        engine = self._trainer.model_wrapped
        only_trained = self._trainer.is_adapter  # the base of an adapter is not saved
        own = nonfinite_weights(self._trainer.model, only_trained=only_trained)
        own += nonfinite_states(self._trainer.model, engine.optimizer)
        names = list(dict.fromkeys(name for names in of_all_ranks(own, self._trainer.group) for name in names))
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            raise RunFailed(
                f"the model is lost at step {self._trainer.state.global_step}: {', '.join(names[:_SHOWN_NAMES])}{more} "
                f"{'is' if len(names) == 1 else 'are'} not finite (NaN or infinite), so that it is not saved",
                hint=AGAIN,
            )

    @contextmanager
    def reading_back(self, folder: Path) -> Iterator[dict[str, str]]:
        """Reads files of tensors back that are written within it, and yields the checksums of all files of a folder.

        They are there at the end of it, on all ranks, which run it together.
        """
        checksums: dict[str, str] = {}
        with reading_back(self._trainer.model_wrapped) as written:
            yield checksums
        own = {os.path.relpath(path, folder): value for path, value in written.items()}
        self._trainer.wait()  # otherwise files of other ranks may be missing
        for others in of_all_ranks(own, self._trainer.group):
            checksums |= others
        if self._trainer.rank.index == self._trainer.disk.ranks[0]:
            own = {name: checksum(folder / name) for name in file_sizes(folder) if name not in checksums}
        for others in of_all_ranks(own, self._trainer.group):
            checksums |= others

    def _mark_part(self, folder: Path, written: Written) -> None:
        """Marks the part on each disk, rank 0's last: then `dstrain run` may gather all parts."""
        for is_turn in (not self._trainer.rank.is_first, self._trainer.rank.is_first):
            if is_turn and self._trainer.rank.index == self._trainer.disk.ranks[0]:
                of_ranks = len(self._trainer.disk.ranks)
                checkpoints.complete_part(folder, written, of_ranks=of_ranks, start=self._trainer.disk.start)
            self._trainer.wait()

    def model(self, folder: Path) -> None:
        """Saves weights for `from_pretrained`; shared ones only if they can be gathered."""
        trainer, weights = self._trainer, self._gathered()
        if weights is None:
            if trainer.rank.is_first:
                # Transformers would save the whole sharded state here, and later again
                trainer.model.config.save_pretrained(folder)
                trainer.processing_class.save_pretrained(folder)
                self._complete_model(folder)
        elif trainer.args.should_save:
            with self._within(weights):
                self._write_model(folder, weights)

    def _gathered(self) -> dict[str, Any] | None:
        """Returns the weights, on the ranks that save them; None if they stay sharded. All ranks run it together."""
        trainer, engine = self._trainer, self._trainer.model_wrapped
        if not self._can_gather():
            return None
        if self._stage == 3 and trainer.is_adapter:  # without the frozen base
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        else:
            configured = section(trainer.args.hf_deepspeed_config.config, "tensor_parallel")
            if configured.get("autotp_size", 0) > 1 and not self._may_gather:
                return None  # the configuration alone shares them; accelerate would raise ValueError
            weights = trainer.accelerator.get_state_dict(engine)
        return weights if trainer.args.should_save else {}

    def _write_model(self, folder: Path, weights: dict[str, Any]) -> None:
        """Writes the weights in the dtype of the base model, and config.json with the base's values."""
        trainer, dtype = self._trainer, saved_model.base_dtype(self._base)
        model = trainer.model
        if weights and not trainer.is_adapter:
            weights = saved_model.without_copies(weights, model)
            if dtype is not None:
                weights = saved_model.converted(weights, model, model.dtype, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=weights)
        trainer.processing_class.save_pretrained(folder)
        self._complete_model(folder)
        adapters.write_beside_adapter(folder, trainer.job)

    def _complete_model(self, folder: Path) -> None:
        """Gives a saved model the configuration of the base model, and the files of its processor."""
        saved_model.restore_config(folder, self._base)
        for file in self._extra_files:
            shutil.copyfile(file, folder / file.name)

    def _can_gather(self) -> bool:
        if (self._stage != 3 and self._trainer.job.tp == 1) or self._trainer.is_adapter:
            return True
        return self._may_gather

    @property
    def _may_gather(self) -> bool:
        """Whether the engine gathers shared weights."""
        return bool(self._trainer.model_wrapped.zero_gather_16bit_weights_on_model_save())

    def save_final(self) -> Path | None:
        """Saves the trained model or adapter and its tokenizer; returns the folder, or None if weights stay sharded.

        It is the best checkpoint's, if the job keeps one. Raises RunFailed on rank 0 if the saved model is
        incomplete, and on all ranks if it is not finite.
        """
        final, best = self._trainer.run_dir.final, self._best_checkpoint()
        if not self._can_gather():
            self._trainer.rank.say(
                f"{GATHERS} is false, so the final model is not gathered; "
                f"to get it: python -m dstrain.train.checkpoints.export {self._trainer.run_dir.path} OUT"
            )
            return None
        # an earlier run's shards would stay beside those of this one
        if self._trainer.rank.is_first and final.exists():
            shutil.rmtree(final)
        self._trainer.wait()
        if best is None:
            self._require_finite()
            with reading_back():
                self.model(final)
        elif self._trainer.rank.is_first:
            copy_model(best, final)
            saved_model.require_same_files(final, recorded(best))
        self._trainer.wait()
        if self._trainer.rank.is_first and self._trainer.is_adapter:
            saved_model.require_whole_adapter(final, self._trainer.model)
            if self._trainer.job.rope_scaling is not None:
                self._trainer.rank.say(adapters.BESIDE_ADAPTER)
        elif self._trainer.rank.is_first:
            saved_model.require_whole_model(final, trust_remote_code=self._trainer.job.trust_remote_code)
        return final

    def _best_checkpoint(self) -> Path | None:
        """Returns the checkpoint that has the final model, and logs it; None if that is the model as it is."""
        best = self.best_model
        if best is None:
            return None
        folder = self._trainer.run_dir.path / f"checkpoint-{best.step}"
        is_last, is_there = best.step == self._trainer.state.global_step, is_whole(folder)
        chosen = folder.name if is_there else f"the last one, since {folder.name} is gone or damaged"
        self._trainer.rank.say(f"{best.text}; the final model is that of {chosen}")
        return folder if is_there and not is_last else None


class LeavingCallback(TrainerCallback):
    """Checks after each step whether any rank was asked to leave; all ranks save and leave together."""

    def __init__(self, leaving: Leaving, heartbeat: Sender, group: Any) -> None:
        """`group` is a gloo group of all ranks, None with one rank."""
        self._leaving = leaving
        self._heartbeat = heartbeat
        self._group = group
        self.has_left = False
        """Whether training ended because of a request."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sends a heartbeat, and ends training if requested."""
        self._heartbeat.send(state.global_step, Phase.STEP, state.max_steps)
        if state.global_step < state.max_steps and self._is_wanted_anywhere():
            self.has_left = True
            args.save_only_model = False  # to resume from
            control.should_save = True
            control.should_training_stop = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sends a heartbeat during an evaluation, however long it is."""
        self._heartbeat.count(Phase.EVALUATING, state.global_step, state.max_steps)

    def _is_wanted_anywhere(self) -> bool:
        if self._group is None:
            return self._leaving.is_wanted
        wanted = torch.tensor([int(self._leaving.is_wanted)])
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self._group)
        return bool(wanted.item())
