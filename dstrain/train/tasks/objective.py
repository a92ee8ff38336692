"""What a task is for the Trainer, and the task of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from dstrain.choices import Task
from dstrain.job.schema import Job
from dstrain.train.data.tokenized import Form
from dstrain.train.tasks.samples import SampleCollator


class Objective(Protocol):
    """A task: what its samples are, and what is to become small.

    A module of `dstrain.train.tasks` has one, and `objective_of` knows it.
    """

    @property
    def num_sequences(self) -> int:
        """Sequences of a sample."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with itself before training."""

    @property
    def collates(self) -> type[SampleCollator]:
        """The class that makes micro-batches of them."""

    @property
    def form(self) -> Form:
        """Its samples in tokens, whose data set is `samples.Samples`."""

    def outputs(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """Returns what the model says of each row of a micro-batch, as its collator makes it."""

    def losses(self, outputs: Any, reference: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns `loss` and further figures of each sample, (samples,) each; `loss` alone has a gradient.

        `reference`: `ComparesLogProbs.log_probs` of the model before training, (rows,); zeros without one.
        """

    def counts(self, outputs: Any) -> torch.Tensor:
        """Returns whether each sample counts, (samples,): those that fill up an evaluation do not."""

    def among(self, outputs: Any) -> Mapping[str, torch.Tensor]:
        """Returns which samples have a figure, (samples,), for figures that not all of them have."""


@runtime_checkable
class ComparesLogProbs(Protocol):
    """What an objective with a reference has besides."""

    def log_probs(self, outputs: Any) -> torch.Tensor:
        """Returns the part of the outputs that a reference is kept of: (rows,)."""


def objective_of(job: Job) -> Objective | None:
    """Returns the objective of a job; None if the loss is that of the model itself."""
    if job.task is Task.DPO:
        from dstrain.train.tasks.dpo import DpoObjective

        return DpoObjective(job=job)
    if job.task is Task.REWARD:
        from dstrain.train.tasks.reward import RewardObjective

        return RewardObjective(job=job)
    if job.task is Task.KTO:
        from dstrain.train.tasks.kto import KtoObjective

        return KtoObjective(job=job)
    return None
