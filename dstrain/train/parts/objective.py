"""The loss of tokens: a part of the Trainer, which asks the model itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dstrain.choices import LossKernel
from dstrain.errors import InvalidConfig
from dstrain.train.data.collate import row_of, without_adapter
from dstrain.train.data.rendering import IGNORED
from dstrain.train.loss import (
    RouterLoss,
    asked_loss,
    computes_own_loss,
    is_mean_of_logits,
    is_that_of_logits,
    mean_loss,
    sums_of,
    takes_targets,
    without_targets,
)
from dstrain.train.parts.parallel import Alone
from dstrain.train.parts.training import Training

_TRIED_TOKENS = 16
"""Tokens of the row on which the loss is tried."""


class Objective(ABC):
    """The quantity that training minimises: the loss of tokens, or of pairs of answers."""

    blank: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns a row that counts nowhere, made of another one; it fills up a rank's share of an evaluation."""

    @abstractmethod
    def attach(self, trainer: Training, parallel: Alone) -> None:
        """Takes the Trainer, which has just been made."""

    def whole(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a collated micro-batch in a form that Transformers does not round on its way to the device."""
        return inputs

    @abstractmethod
    def loss(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any, own: Callable[..., Any]
    ) -> tuple[torch.Tensor, Any]:
        """Returns the loss of a micro-batch, and the outputs of the model; `own` is Transformers' `compute_loss`."""

    @abstractmethod
    def evaluated(self, engine: Any, batches: Iterable[dict[str, Any]]) -> Mapping[str, float]:
        """Returns `loss` and other figures of an evaluation; `batches` are the inputs of this rank's micro-batches."""

    @abstractmethod
    def totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of this rank's micro-batch: (2,), float64."""

    def known_totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and their number, (2,), float64, in as little memory as a step takes."""
        return self.totals(engine, inputs)

    @abstractmethod
    def learned_tokens(self) -> Any:
        """Returns the tokens with loss of the first row: (tokens,)."""

    @abstractmethod
    def tried(self, num_tokens: int, size: int) -> dict[str, Any]:
        """Returns a micro-batch of that many tokens: the first ones with loss, repeated if there are fewer."""

    def try_loss(self) -> None:  # noqa: B027  # most need nothing
        """Raises InvalidConfig for a loss that cannot be trained."""

    def complete_data(self, checkpoint: str | None) -> None:  # noqa: B027  # most need nothing
        """Adds figures of the model itself to the data; `checkpoint` is the one to resume from."""

    def figures(self) -> Mapping[str, float]:
        """Returns figures of the logging window beside the loss, and starts anew."""
        return {}

    def forget(self) -> None:  # noqa: B027  # most need nothing
        """Drops figures of losses outside of training."""


class TokenLoss(Objective):
    """The mean loss per token of a step, which the model computes."""

    blank = staticmethod(without_targets)

    def attach(self, trainer: Training, parallel: Alone) -> None:
        """Takes the Trainer. Raises InvalidConfig for a model without the auxiliary loss that the job asks for."""
        self._trainer, self._parallel = trainer, parallel
        self._router = RouterLoss(trainer.model, trainer.job, trainer.rank.world_size)
        if computes_own_loss(trainer.model):
            trainer.model_accepts_loss_kwargs = False  # see `try_loss`

    def loss(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any, own: Callable[..., Any]
    ) -> tuple[torch.Tensor, Any]:
        """Returns the loss of a micro-batch; the mean over the ranks, summed over a step, is its mean per token."""
        trainer = self._trainer
        if trainer.job.sp > 1:  # ranks with parts of rows have no auxiliary loss
            return self._parallel.loss(model, inputs, num_items_in_batch, own)
        inputs = {**inputs, **self._router.arguments}
        loss, outputs = self._parallel.loss(model, inputs, num_items_in_batch, own)
        if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            loss = self._router.weighed(loss, outputs, trainer.current_gradient_accumulation_steps)
        return loss, outputs

    def evaluated(self, engine: Any, batches: Iterable[dict[str, Any]]) -> Mapping[str, float]:
        """Returns the mean loss per token over all ranks; Transformers' own loop averages over micro-batches."""
        loss, targets = mean_loss(lambda inputs: self.totals(engine, dict(inputs)), batches, self._trainer.group)
        return {"loss": loss, "tokens": targets}

    def totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of targets of this rank's micro-batch: (2,), float64."""
        return self._parallel.totals(engine, inputs)

    def known_totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and their number, (2,), float64, in as little memory as a step takes."""
        if self._trainer.model_accepts_loss_kwargs:
            return sums_of(engine, inputs)
        loss = engine(**inputs).loss.double()
        return torch.stack([loss, torch.ones_like(loss)])

    def learned_tokens(self) -> Any:
        """Returns the tokens with loss of the first row, (tokens,), none of which belongs to an image."""
        labels = np.asarray(self._trainer.first_rows[0]["labels"])
        return labels[labels != IGNORED]

    def tried(self, num_tokens: int, size: int) -> dict[str, Any]:
        """Returns a micro-batch of that many tokens: the first ones with loss, repeated if there are fewer."""
        tokens = np.resize(self.learned_tokens(), num_tokens)
        row = row_of(tokens, tokens, np.array([len(tokens)]))
        return self._trainer.inputs_of(self._trainer.data_collator([row] * size))

    def try_loss(self) -> None:
        """Raises InvalidConfig for a loss that ranks of a group cannot share, or whose head does not make logits."""
        trainer, job, engine = self._trainer, self._trainer.job, self._trainer.model_wrapped
        is_fused = job.loss is LossKernel.FUSED
        if trainer.model_accepts_loss_kwargs and not is_fused:
            return
        inputs = self.tried(_TRIED_TOKENS, trainer.trial_size())
        if not trainer.model_accepts_loss_kwargs:
            trainer.model_accepts_loss_kwargs = takes_targets(engine, inputs)
        name = type(without_adapter(trainer.model)).__name__
        if not trainer.model_accepts_loss_kwargs and (job.ranks_per_batch > 1 or is_fused):
            key, cure = ("sp", 1) if job.sp > 1 else ("tp", 1) if job.tp > 1 else ("loss", LossKernel.CHUNKED)
            problem = f"the loss of {name} does not take shifted labels and token counts"
            raise InvalidConfig(f"{key} is {getattr(job, key)}, but {problem}", hint=f"{key}: {cure}")
        if not trainer.model_accepts_loss_kwargs:
            self._replace_mean(name, inputs)
        if is_fused and not is_that_of_logits(engine, inputs):
            problem = f"{name} changes its logits between head and loss"
            raise InvalidConfig(f"loss is fused, but {problem}", hint="loss: chunked")

    def _replace_mean(self, name: str, inputs: dict[str, Any]) -> None:
        """Asks for the mean over the tokens of a step in the place of a model whose loss is a mean of a micro-batch."""
        trainer = self._trainer
        if is_mean_of_logits(trainer.model_wrapped, inputs):
            trainer.compute_loss_func = asked_loss(trainer.model)
            text = f"{name} takes the mean of each micro-batch; its loss is computed over the tokens of a step instead"
        else:
            text = f"{name} has a loss of its own: that of a step is a mean of micro-batches, not of tokens"
        trainer.rank.say(text)
