"""The loss of pairs of answers: a part of the Trainer, which asks DPO's formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dstrain.heartbeat import Phase
from dstrain.train.data.packing import row_of
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.loss import trial
from dstrain.train.parallel import Alone
from dstrain.train.preferences import reference
from dstrain.train.preferences.dpo import Answers, DpoObjective, Figures
from dstrain.train.preferences.pairs import REFERENCE, PairData, without_targets
from dstrain.train.training import Training
from dstrain.units import counted


class PairLoss:
    """The mean loss of the pairs of a step, with a reference of the model before training."""

    blank = staticmethod(without_targets)

    def __init__(self, dpo: DpoObjective, *, train_digest: str, eval_digest: str | None) -> None:
        """Takes the formula, and the digests of the data, by which references are stored."""
        self._dpo = dpo
        self._digests = train_digest, eval_digest
        self._figures = Figures()

    def attach(self, trainer: Training, parallel: Alone) -> None:
        """Takes the Trainer."""
        self._trainer = trainer
        trainer.model_accepts_loss_kwargs = False  # every micro-batch has as many pairs: a step is the mean of means

    def whole(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a micro-batch with the bits of the reference as integers: Transformers casts floats to bf16."""
        inputs[REFERENCE] = inputs[REFERENCE].double().view(torch.int64)
        return inputs

    def loss(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any, own: Callable[..., Any]
    ) -> tuple[torch.Tensor, Any]:
        """Returns the mean loss over the pairs of a micro-batch; the mean over all of a step is that of its pairs.

        The training data are padded to whole steps, so no micro-batch is shorter than another one.
        """
        with self._trainer.meter.forward(inputs["input_ids"].numel()):
            outputs, figures = self._outcome(model, inputs)
        others = {name: value for name, value in figures.items() if name != "loss"}
        self._figures.add(others, self._dpo.counts(outputs))
        return figures["loss"].mean(), outputs

    def _outcome(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Answers, Mapping[str, torch.Tensor]]:
        outputs = self._dpo.outputs(model, inputs)
        return outputs, self._dpo.losses(outputs, inputs[REFERENCE].view(torch.float64))

    def evaluated(self, engine: Any, batches: Iterable[dict[str, Any]]) -> Mapping[str, float]:
        """Returns the means of loss and figures over the pairs of all ranks, each of which counts once."""
        evaluated = Figures()
        for inputs in batches:
            outputs, figures = self._outcome(engine, inputs)
            evaluated.add(figures, self._dpo.counts(outputs))
        means, count = evaluated.drain(self._trainer.group)
        return {**means, "samples": count}

    def totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of pairs of this rank's micro-batch: (2,), float64."""
        losses = self._outcome(engine, inputs)[1]["loss"].double()
        return torch.stack([losses.sum(), torch.ones_like(losses).sum()])

    known_totals = totals

    def learned_tokens(self) -> Any:
        """Returns the tokens with loss of the first chosen answer: (tokens,)."""
        labels = np.asarray(self._trainer.train_dataset[0]["sequences"][0]["labels"])
        return labels[labels != IGNORED]

    def tried(self, num_tokens: int, size: int) -> dict[str, Any]:
        """Returns a micro-batch of that many tokens, without the reference."""
        tokens = np.resize(self.learned_tokens(), num_tokens)
        row = row_of(tokens, tokens, np.array([len(tokens)]))
        single = {"sequences": [row], REFERENCE: np.zeros(1)}
        inputs = self._trainer.inputs_of(self._trainer.data_collator([single] * size))
        del inputs[REFERENCE]
        return inputs

    def try_loss(self) -> None:
        """Does nothing: the model computes no loss."""

    def complete_data(self, checkpoint: str | None) -> None:
        """Gives the pairs their reference."""
        of_training, of_evaluation = self._digests
        self._read_or_compute("training", self._trainer.train_dataset, of_training, checkpoint)
        if of_evaluation is not None:
            self._read_or_compute("evaluation", self._trainer.eval_dataset, of_evaluation, checkpoint)

    def figures(self) -> Mapping[str, float]:
        """Returns the task's figures, as means over the pairs of the window on all ranks."""
        return self._figures.drain(self._trainer.group)[0]

    def forget(self) -> None:
        """Drops the figures of losses outside of training."""
        self._figures = Figures()

    def _read_or_compute(self, words: str, pairs: PairData, digest: str, checkpoint: str | None) -> None:
        """Gives pairs their reference: that of an earlier start, or computed by the model before its first step.

        Raises InvalidConfig if a run resumes, with a model that is trained already, and has none.
        """
        trainer = self._trainer
        file = reference.file_of(trainer.run_dir, trainer.job, digest)
        store = reference.Store(file, rank=trainer.rank, disk=trainer.disk, group=trainer.group)
        pairs.reference = store.read()
        if pairs.reference is not None:
            trainer.rank.say(f"reference log-probabilities of the {words} data: {file.name}")
        elif checkpoint is not None:
            raise reference.missing(file, checkpoint)
        else:
            trainer.rank.say(
                f"computing reference log-probabilities of the {words} data: {counted(len(pairs), 'pair')}"
            )
            pairs.reference = store.write(self._computed(pairs))

    def _computed(self, pairs: PairData) -> reference.Array:
        """Returns the log-probabilities of all pairs under the model as it is; all ranks run it together."""
        trainer = self._trainer
        engine = trainer.model_wrapped
        batches = trainer.get_eval_dataloader(pairs)
        total, numbers = len(batches), itertools.count(1)

        def log_probs_of(batch: Mapping[str, Any]) -> torch.Tensor:
            trainer.heartbeat.count(Phase.REFERENCE, next(numbers), total)
            with trainer.compute_loss_context_manager():
                return self._dpo.outputs(engine, trainer.inputs_of(batch)).log_probs

        with trial(engine):
            found = reference.computed(batches, log_probs_of, num_pairs=len(pairs), group=trainer.group)
        trainer.heartbeat.send(trainer.state.global_step, Phase.LOADING)
        return found
