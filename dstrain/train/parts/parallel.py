"""How ranks share the work of a micro-batch: a part of the Trainer, by default for ranks that share nothing.

Tensor parallelism (DeepSpeed's AutoTP): the ranks of a group share each weight and train on the same micro-batch.
Transformers splits the model before the engine starts, by the `tp_plan` of its family; accelerate deals out the rows to
groups, and gathers the weights of a saved model. Source: Transformers 5.23 integrations/deepspeed.py: deepspeed_init;
accelerate 1.15 accelerator.py: _prepare_deepspeed, get_state_dict; deepspeed 0.19.8 runtime/engine.py:
_apply_autotp_partitioning, _replace_module_consolidated_state_dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups  # type: ignore[import-untyped]
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dstrain.choices import Attention, LossKernel
from dstrain.facts.ds_config import zero_stage
from dstrain.job.schema import Job
from dstrain.monitor.meter import COUNTS, CountingCollator
from dstrain.train.data.collate import Slice
from dstrain.train.data.isolation import attend_by_sample, by_sample
from dstrain.train.loss import loss_of, sums_of, targets_of
from dstrain.train.parts.training import Training
from dstrain.train.rank import Rank


class Alone:
    """Each rank trains on micro-batches of its own."""

    trainer: Training

    def collator(self, collator: Any) -> Any:
        """Returns the collator of this rank, given a collator of whole rows."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingCollator:
    """Cuts this rank's slice out of the rows of its group."""

    collator: CountingCollator
    part: Slice

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Returns the tensors of the slice, (batch, seq / ranks of the group), and the counts of the whole rows."""
        batch = self.collator(rows)
        return {**self.part.cut(batch), COUNTS: batch[COUNTS]}


class SequenceParallel(Alone):
    """Each rank trains on slices of the rows of its group."""

    def __init__(self, job: Job, rank: Rank) -> None:
        """Takes the slice of a rank."""
        self._part = Slice(index=rank.index % job.sp, count=job.sp)

    def collator(self, collator: CountingCollator) -> SlicingCollator:
        """Returns the collator of this rank's slices."""
        return SlicingCollator(collator=collator, part=self._part)

    def attach(self, trainer: Training) -> None:
        """Takes the Trainer, and the place of accelerate's adapter for data loaders."""
        super().attach(trainer)
        trainer.accelerator.deepspeed_ulysses_dl_adapter = self._adapted

    def _adapted(self, batches: Any, engine: Any) -> Any:
        """Returns the data loader as it is, since its micro-batches are slices already.

        Attention has just been registered to exchange slices; accelerate turned that off in evaluations, for whole
        rows on every rank. It drops masks, so PyTorch's attention gets the samples of packed rows one by one.
        """
        job = self.trainer.job
        registered = ALL_ATTENTION_FUNCTIONS[str(job.attn)]
        ulysses = inspect.getclosurevars(registered).nonlocals["uattn"]
        ulysses.disable_in_eval = False
        if job.packing and job.attn == Attention.SDPA:
            ulysses.attn = by_sample(ulysses.attn)
            attend_by_sample(self.trainer.model, attention=registered)
        return batches

    def shard(self, batches: Any) -> Any:
        """Returns the micro-batches of this rank; all ranks of a group have the same."""
        shard = batches.batch_sampler
        shard.num_processes, shard.process_index = self.trainer.num_shares, self.trainer.share
        return batches

    def total_batch(self, samples: int) -> int:
        """Returns the samples of a step: the ranks of a group share them."""
        return samples // self.trainer.job.sp

    def loss(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any, own: Callable[..., Any]
    ) -> tuple[torch.Tensor, Any]:
        """Returns the loss of the whole rows; the mean over all ranks and micro-batches is that per token of the step.

        `num_items_in_batch`: targets of the step on all ranks.
        """
        with self.trainer.meter.forward(inputs["input_ids"].numel()):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return group_sum(outputs.loss * self.trainer.num_shares, self._gradient_scale), outputs

    @property
    def _gradient_scale(self) -> int:
        """The factor that gradients of slices need: the engine sums them and divides by the groups, or by the ranks.

        Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py, runtime/engine.py: world size / sequence_parallel_size;
        runtime/comm/coalesced_collectives.py, which ZeRO-3 reduces with: world size.
        """
        return self.trainer.job.sp if zero_stage(self.trainer.args.hf_deepspeed_config.config) == 3 else 1

    def trial_size(self) -> int:
        """Returns the rows of every micro-batch: Ulysses knows one size."""
        return int(self.trainer.args.per_device_train_batch_size)

    def whole_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits of the rows of all slices."""
        return whole_rows(logits)


def group_sum(loss: torch.Tensor, scale: int) -> torch.Tensor:
    """Returns the sum of a loss over the ranks of a group; its gradient is this rank's part times `scale`."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=groups._get_sequence_parallel_group())
    part = loss * scale
    return part + (total - part.detach())


def whole_rows(part: torch.Tensor) -> torch.Tensor:
    """Returns rows of all slices: (batch, seq / ranks of the group, …) becomes (batch, seq, …)."""
    group = groups._get_sequence_parallel_group()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=1)
