"""How ranks share the work of a micro-batch: a part of the Trainer, by default for ranks that share nothing.

Tensor parallelism (DeepSpeed's AutoTP): the ranks of a group share each weight and train on the same micro-batch.
Transformers splits the model before the engine starts, by the `tp_plan` of its family; accelerate deals out the rows to
groups, and gathers the weights of a saved model. Source: Transformers 5.23 integrations/deepspeed.py: deepspeed_init;
accelerate 1.15 accelerator.py: _prepare_deepspeed, get_state_dict; deepspeed 0.19.8 runtime/engine.py:
_apply_autotp_partitioning, _replace_module_consolidated_state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dstrain.choices import LossKernel
from dstrain.train.evaluation import loss_of
from dstrain.train.loss import sums_of, targets_of
from dstrain.train.training import Training


class Alone:
    """Each rank trains on micro-batches of its own."""

    trainer: Training

    def collator(self, collator: Any) -> Any:
        """Returns the collator of this rank, given that of whole rows."""
        return collator

    def attach(self, trainer: Training) -> None:
        """Takes the Trainer, which has just been made."""
        self.trainer = trainer

    def begin(self) -> None:
        """Prepares the model before the engine is made. Raises InvalidConfig for a model that cannot be shared."""

    def shard(self, batches: Any) -> Any:
        """Returns the training data loader, which has the micro-batches of this rank."""
        return batches

    def part(self, optimizer: Any) -> None:
        """Changes the groups of parameters of a new optimizer."""

    def loss(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any, own: Callable[..., Any]
    ) -> tuple[torch.Tensor, Any]:
        """Returns the loss of a micro-batch, and the outputs of the model; `own` is Transformers' `compute_loss`."""
        with self.trainer.meter.forward(inputs["input_ids"].numel()):
            loss, outputs = own(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return loss, outputs

    def totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of this rank's micro-batch: (2,), float64."""
        if self.trainer.job.loss is LossKernel.FUSED:  # spares the logits
            return sums_of(engine, inputs)
        labels, shifted = inputs.pop("labels"), inputs.pop("shift_labels", None)
        return loss_of(engine(**inputs).logits, targets_of(labels, shifted))

    def trial_size(self) -> int:
        """Returns the rows of the micro-batch on which the loss and isolation are tried."""
        return min(int(self.trainer.args.per_device_train_batch_size), 2)

    def whole_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, seq, vocab) of whole rows."""
        return logits

    def total_batch(self, samples: int) -> int:
        """Returns the samples of a step, given those that all ranks would have alone."""
        return samples

    def saving(self, weights: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Context in which the gathered weights of the model are saved."""
        return nullcontext()


class TensorParallel(Alone):
    """Each rank holds a part of each weight."""

    def totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the totals of a micro-batch on the first rank of its group, and zeros on the others: (2,), float64.

        The loss is the model's own, since a rank may have the logits of a part of the vocabulary.
        """
        totals = sums_of(engine, inputs)
        is_first = self.trainer.rank.index % self.trainer.job.ranks_per_batch == 0
        return totals if is_first else torch.zeros_like(totals)
