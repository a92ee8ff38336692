"""The part of the Trainer that reads a stream: micro-batches without an end, and their place in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dstrain.train.data.stream import Stream
from dstrain.train.data.stream_progress import StreamProgress, said
from dstrain.train.rank import of_all_ranks
from dstrain.train.watched import WatchedTrainer


class StreamingTrainer(WatchedTrainer):
    """What a rank does if its data are a stream; other data are as Transformers reads them."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of `WatchedTrainer`."""
        super().__init__(**options)
        self._progress: StreamProgress | None = None
        data: Any = self.train_dataset
        if isinstance(data, Stream):
            ranks = {"rank": self._rank.index, "num_ranks": self._rank.world_size}
            workers = self.args.dataloader_num_workers
            self._progress = StreamProgress(data, self._data_digest, **ranks, workers=workers)

    @property
    def first_rows(self) -> Any:
        """Rows on which the model is tried: those of the data, or the first ones of a stream."""
        data: Any = self.train_dataset
        return data.first_rows if isinstance(data, Stream) else data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns the micro-batches of this rank; those of a stream have no end, so that all ranks have as many."""
        data: Any = self.train_dataset
        if self._progress is None:
            return super().get_train_dataloader()
        return DataLoader(
            data,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # from PyTorch's own a resumed run would draw a number more
        )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of one step, and notes how far that is in a stream."""
        batches = epoch_iterator if self._progress is None else self._progress.noted(epoch_iterator)
        return super().get_batch_samples(batches, num_batches, device)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Trains; a stream goes on where the checkpoint was, and at the end the log has what was read."""
        if self._progress is not None and isinstance(resume_from_checkpoint, str):
            note = self._progress.restore(Path(resume_from_checkpoint))
            if note is not None:
                self._rank.say(f"note: {note}")
        output = super().train(resume_from_checkpoint, *arguments, **options)
        self._say_read()
        return output

    def _save_rng_state(self, output_dir: str) -> None:
        """Writes what a resumed run needs of this rank: its random numbers, and where it is in a stream."""
        super()._save_rng_state(output_dir)
        if self._progress is not None:
            self._progress.save(Path(output_dir))

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """Logs, saves and evaluates; with a checkpoint the log has what was read of a stream."""
        if self._progress is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps  # Transformers' begins anew with a resume
        is_saved = self.control.should_save
        super()._maybe_log_save_evaluate(*arguments, **options)
        if is_saved and self.state.global_step < self.state.max_steps:
            self._say_read()

    def _say_read(self) -> None:
        """Logs what all ranks have read of a stream."""
        if self._progress is not None:
            for line in said(of_all_ranks((self._progress.counts, self._progress.problems), self._group), self._job):
                self._rank.say(line)
