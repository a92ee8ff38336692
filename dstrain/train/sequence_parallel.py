"""Ulysses sequence parallelism: the ranks of a group train on slices of the same micro-batch.

Each rank reads the whole rows and keeps its slice, so micro-batches, steps and resuming are those of a run with one
rank per group; accelerate's adapter for data loaders, which deals out the rows of all ranks in turn, is not needed.
Source: accelerate 1.15 accelerator.py: _prepare_deepspeed; deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups  # type: ignore[import-untyped]
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dstrain.choices import Attention
from dstrain.facts.ds_config import zero_stage
from dstrain.job.schema import Job
from dstrain.monitor.meter import COUNTS, CountingCollator
from dstrain.train.data.by_sample import attend_by_sample, by_sample
from dstrain.train.data.slices import Slice
from dstrain.train.parallel import Alone
from dstrain.train.rank import Rank
from dstrain.train.training import Training


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
    """Returns the sum of a loss over the ranks of a group; its gradient is that of this rank's part times `scale`."""
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
