"""The Trainer as its parts and the checks before the first step see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from dstrain.heartbeat import Sender
from dstrain.job.schema import Job
from dstrain.monitor.meter import Meter
from dstrain.oom import Batch
from dstrain.rundir import RunDir
from dstrain.train.checkpoints.checkpoints import Disk
from dstrain.train.rank import Rank


class Training(Protocol):
    """A rank that trains. Transformers' Trainer has the attributes without a docstring."""

    job: Job
    run_dir: RunDir
    rank: Rank
    disk: Disk
    group: Any
    """A gloo group of all ranks; None with one rank."""
    heartbeat: Sender
    num_shares: int
    """Ranks, or groups of ranks, that have micro-batches of their own."""
    share: int
    """Index of the share of this rank."""
    batch: Batch | None
    """The micro-batch that this rank works on."""

    args: Any
    state: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    callback_handler: Any
    current_gradient_accumulation_steps: int
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any

    @property
    def meter(self) -> Meter:
        """The meter of this rank."""

    @property
    def first_rows(self) -> Any:
        """Rows on which the model is tried: all data, or the first rows of a stream."""

    @property
    def is_adapter(self) -> bool:
        """Whether the model has adapters."""

    def trial_size(self) -> int:
        """Returns the rows of the micro-batch on which the loss and isolation are tried."""

    def inputs_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs of the model for a collated micro-batch, on its device."""

    def items_in(self, batch: dict[str, Any]) -> Any:
        """Returns the tokens with loss in a collated micro-batch of each rank, on all ranks."""

    def totals(self, engine: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of a collated micro-batch: (2,), float64."""

    def forget_losses(self) -> None:
        """Drops what losses outside of training left for the log."""

    def wait(self) -> None:
        """Waits for all ranks."""

    def write_parts(self, folder: str) -> None:
        """Writes the contents of a checkpoint, without marking it as one; all ranks run it together."""

    def add_callback(self, callback: Any) -> None: ...

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor: ...

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...

    def compute_loss_context_manager(self) -> Any: ...

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any: ...

    def evaluation_loop(self, dataloader: Any, description: str, *arguments: Any, **options: Any) -> Any: ...
