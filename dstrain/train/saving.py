"""Transformers' Trainer with complete checkpoints and a complete final model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers

from dstrain.checksums import checksum
from dstrain.choices import Method
from dstrain.config.resolve_auto import GATHERS
from dstrain.errors import InvalidConfig, RunFailed
from dstrain.facts.ds_config import ZERO, section, zero_stage
from dstrain.job.schema import Job
from dstrain.monitor.best_model import BestModel
from dstrain.monitor.health.nonfinite import AGAIN
from dstrain.paths import flush
from dstrain.rundir import RunDir, file_sizes, is_whole, rotate
from dstrain.train import rope_scaling
from dstrain.train.best_model import BestModelCallback, copy_model
from dstrain.train.checkpoints import checkpoints, saved_model
from dstrain.train.checkpoints.checkpoints import Written
from dstrain.train.checkpoints.finite import nonfinite_states, nonfinite_weights
from dstrain.train.checkpoints.node_storage import Disk
from dstrain.train.checkpoints.read_back import reading_back
from dstrain.train.checkpoints.verify import recorded
from dstrain.train.rank import Rank, of_all_ranks


def require_weights(job: Job, ds_config: Mapping[str, Any]) -> None:
    """Raises InvalidConfig for checkpoints of the weights alone under a ZeRO-3 that does not gather them."""
    gathers = section(ds_config, ZERO).get(GATHERS)
    if job.save_only_model and job.method is Method.FULL and zero_stage(ds_config) == 3 and not gathers:
        problem = f"save_only_model is true, but {GATHERS} is not, so that checkpoints would have no weights"
        raise InvalidConfig(problem, hint=f'Write "{GATHERS}": true into zero_optimization.')


_SHOWN_NAMES = 5
"""Names in an error; more are counted."""


class SavingTrainer(transformers.Trainer):
    """What a rank writes."""

    _group: Any = None
    """A gloo group of all ranks; None with one rank."""

    def __init__(
        self,
        *,
        job: Job,
        run_dir: RunDir,
        rank: Rank,
        disk: Disk,
        base: Mapping[str, Any],
        data_digest: str,
        extra_files: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        """`base` is the configuration of the base model, `extra_files` those of its processor, which go with each
        saved model; `options` are those of Transformers' Trainer.
        """
        super().__init__(**options)
        self._job = job
        self._run_dir = run_dir
        self._rank = rank
        self._disk = disk
        self._base = base
        self._data_digest = data_digest
        self._extra_files = extra_files
        self._stage = zero_stage(self.args.hf_deepspeed_config.config)
        self._best = BestModelCallback(job) if job.keeps_best else None
        if self._best is not None:
            if disk.is_apart:
                problem = "the best checkpoint stays on a disk that all nodes share, but these have disks of their own"
                raise InvalidConfig(problem, hint="load_best: false, without early_stopping")
            self.add_callback(self._best)

    @property
    def best_model(self) -> BestModel | None:
        """The model of the lowest evaluation loss; None if the job does not keep it, or no evaluation had a loss."""
        return self._best.outcome(self.state) if self._best is not None else None

    def _written(self, checksums: Mapping[str, str]) -> Written:
        return Written(
            step=self.state.global_step,
            world_size=self._rank.world_size,
            zero_stage=self._stage,
            micro_batch=self.args.per_device_train_batch_size,
            grad_accum=self.args.gradient_accumulation_steps,
            sp=self._job.sp,
            tp=self._job.tp,
            ep=self._job.ep,
            optimizer=self._job.optimizer,
            data=self._data_digest,
            rope_scaling=self._job.rope_scaling,
            attn=self._job.attn,
            only_model=self.args.save_only_model,
            checksums=checksums,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint; rank 0 marks it as complete after all ranks have written their parts.

        Raises RunFailed for weights or states that are not finite, and for files that hold something else.
        """
        folder = self._run_dir.path / f"checkpoint-{self.state.global_step}"
        self._require_finite()
        if self._rank.index == self._disk.ranks[0]:
            checkpoints.begin(folder)
        self._wait()
        with self._reading_back(folder) as checksums:
            super()._save_checkpoint(model, trial)
            self._add_to_checkpoint(folder)
        self._wait()
        if self._rank.local_index == 0:
            flush(folder)
        self._wait()
        if self._disk.is_apart:
            self._mark_part(folder, self._written(checksums))
        elif self._rank.is_first:
            checkpoints.complete(folder, self._written(checksums))
            rotate(self._run_dir, self._job.save_total_limit)

    def _add_to_checkpoint(self, folder: Path) -> None:
        """Writes what else belongs into a checkpoint; here nothing."""

    def _require_finite(self) -> None:
        """Raises RunFailed, on all ranks, if a weight or a state of the optimizer is not finite on any of them."""
        engine: Any = self.model_wrapped
        own = nonfinite_weights(self.model, only_trained=self._is_adapter())  # the base of an adapter is not saved
        own += nonfinite_states(self.model, engine.optimizer)
        names = list(dict.fromkeys(name for names in of_all_ranks(own, self._group) for name in names))
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            raise RunFailed(
                f"the model is lost at step {self.state.global_step}: {', '.join(names[:_SHOWN_NAMES])}{more} "
                f"{'is' if len(names) == 1 else 'are'} not finite (NaN or infinite), so that it is not saved",
                hint=AGAIN,
            )

    @contextmanager
    def _reading_back(self, folder: Path) -> Iterator[dict[str, str]]:
        """Reads files of tensors back that are written within it, and yields the checksums of all files of a folder.

        They are there at the end of it, on all ranks, which run it together.
        """
        checksums: dict[str, str] = {}
        with reading_back(self.model_wrapped) as written:
            yield checksums
        own = {os.path.relpath(path, folder): value for path, value in written.items()}
        self._wait()  # otherwise files of other ranks may be missing
        for others in of_all_ranks(own, self._group):
            checksums |= others
        if self._rank.index == self._disk.ranks[0]:
            own = {name: checksum(folder / name) for name in file_sizes(folder) if name not in checksums}
        for others in of_all_ranks(own, self._group):
            checksums |= others

    def write_parts(self, folder: str) -> None:
        """Writes what a checkpoint consists of, without marking it as one; all ranks run it together."""
        with self._reading_back(Path(folder)):
            self.save_model(folder, _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(folder)
                self._save_rng_state(folder)

    def _mark_part(self, folder: Path, written: Written) -> None:
        """Marks the part on each disk, rank 0's last: then `dstrain run` may gather all parts."""
        for is_turn in (not self._rank.is_first, self._rank.is_first):
            if is_turn and self._rank.index == self._disk.ranks[0]:
                of_ranks = len(self._disk.ranks)
                checkpoints.complete_part(folder, written, of_ranks=of_ranks, start=self._disk.start)
            self._wait()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves weights for `from_pretrained`; shared ones only where the configuration allows gathering them."""
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
            self._copy_extra_files(Path(folder))

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
            self._copy_extra_files(folder)

    def _copy_extra_files(self, folder: Path) -> None:
        for file in self._extra_files:
            shutil.copyfile(file, folder / file.name)

    def _is_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _can_gather(self) -> bool:
        if (self._stage != 3 and self._job.tp == 1) or self._is_adapter():
            return True
        engine: Any = self.model_wrapped
        return bool(engine.zero_gather_16bit_weights_on_model_save())

    def save_final(self) -> Path | None:
        """Saves the trained model or adapter and its tokenizer; returns the folder, or None if weights stay sharded.

        It is that of the best checkpoint, if the job keeps one. Raises RunFailed on rank 0 if the saved model is
        incomplete, and on all ranks if it is not finite.
        """
        final, best = self._run_dir.final, self._best_checkpoint()
        if not self._can_gather():
            self._rank.say(
                f"{GATHERS} is false, so the final model is not gathered; "
                f"to get it: python -m dstrain.train.checkpoints.export {self._run_dir.path} OUT"
            )
            return None
        if self._rank.is_first and final.exists():
            shutil.rmtree(final)
        self._wait()
        if best is None:
            self._require_finite()
            with reading_back():
                self.save_model(str(final))
        elif self._rank.is_first:
            copy_model(best, final)
            saved_model.require_same_files(final, recorded(best))
        if self._rank.is_first:
            (final / "training_args.bin").unlink(missing_ok=True)  # a pickle with this machine's paths
        self._wait()
        if self._rank.is_first and self._is_adapter():
            saved_model.require_whole_adapter(final, self.model)
        elif self._rank.is_first:
            saved_model.require_whole_model(final, trust_remote_code=self._job.trust_remote_code)
        return final

    def _best_checkpoint(self) -> Path | None:
        """Returns the checkpoint that has the final model, and logs it; None if that is the model as it is."""
        best = self.best_model
        if best is None:
            return None
        folder = self._run_dir.path / f"checkpoint-{best.step}"
        is_last, is_there = best.step == self.state.global_step, is_whole(folder)
        chosen = folder.name if is_there else f"the last one, since {folder.name} is gone or damaged"
        self._rank.say(f"{best.text}; the final model is that of {chosen}")
        return folder if is_there and not is_last else None

    def _wait(self) -> None:
        if dist.is_initialized() and self._rank.world_size > 1:
            dist.barrier()
