"""The Trainer of DPO, whose loss is not that of the model itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import EvalLoopOutput

from dstrain.heartbeat import Phase
from dstrain.train.data.packing import row_of
from dstrain.train.data.tokenize import IGNORED
from dstrain.train.loss_trials import trial
from dstrain.train.preferences import reference
from dstrain.train.preferences.dpo import Answers, DpoObjective, Figures
from dstrain.train.preferences.pairs import REFERENCE, PairData, without_targets
from dstrain.train.trainer import Trainer
from dstrain.units import counted


class DpoTrainer(Trainer):
    """The Trainer of one rank, for pairs."""

    blank = staticmethod(without_targets)

    def __init__(self, *, objective: DpoObjective, eval_digest: str | None, **options: Any) -> None:
        """`eval_digest` is the digest of the evaluation data; `options` are those of `Trainer`."""
        super().__init__(**options)
        self._objective = objective
        self._eval_digest = eval_digest
        self._figures = Figures()
        self.model_accepts_loss_kwargs = False  # every micro-batch has as many pairs: a step is the mean of means

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the mean loss over the pairs of a micro-batch; the mean over all of a step is that of its pairs.

        `_get_train_sampler` pads the data to whole steps, so no micro-batch is shorter than another one.
        """
        with self.meter.forward(inputs["input_ids"].numel()):
            outputs, figures = self._outcome(model, inputs)
        others = {name: value for name, value in figures.items() if name != "loss"}
        self._figures.add(others, self._objective.counts(outputs))
        loss = figures["loss"].mean()
        return (loss, outputs) if return_outputs else loss

    def _outcome(self, model: Any, inputs: dict[str, Any]) -> tuple[Answers, Mapping[str, torch.Tensor]]:
        outputs = self._objective.outputs(model, inputs)
        return outputs, self._objective.losses(outputs, inputs[REFERENCE])

    def _known_totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        losses = self._outcome(engine, inputs)[1]["loss"].double()
        return torch.stack([losses.sum(), torch.ones_like(losses).sum()])

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs of the model, with the reference as exact as it is: Transformers rounds to bf16."""
        known = inputs.pop(REFERENCE).to(self.args.device)
        return {**super()._prepare_inputs(inputs), REFERENCE: known}

    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """Returns the means of loss and figures over the pairs of all ranks, each of which counts once."""
        engine: Any = self.model_wrapped
        engine.eval()
        evaluated = Figures()
        for batch in dataloader:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            with torch.no_grad(), self.compute_loss_context_manager():
                outputs, figures = self._outcome(engine, self._prepare_inputs(dict(batch)))
            evaluated.add(figures, self._objective.counts(outputs))
        means, count = evaluated.drain(self._group)
        metrics = {f"{metric_key_prefix}_{name}": mean for name, mean in means.items()}
        metrics[f"{metric_key_prefix}_samples"] = count
        num_samples = len(dataloader.dataset.rows)
        return EvalLoopOutput(predictions=np.empty(0), label_ids=None, metrics=metrics, num_samples=num_samples)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs together with the task's figures, as means over the pairs of the window on all ranks."""
        if "loss" in logs:
            logs.update(self._figures.drain(self._group)[0])
        super().log(logs, start_time)

    def _try_loss(self, size: int) -> None:
        """Does nothing: the model computes no loss."""

    def _tried_inputs(self, num_tokens: int, size: int) -> dict[str, Any]:
        """Returns a micro-batch of so many tokens, without the reference."""
        pairs: Any = self.train_dataset
        labels = np.asarray(pairs[0]["sequences"][0]["labels"])
        tokens = np.resize(labels[labels != IGNORED], num_tokens)
        row = row_of(tokens, tokens, np.array([len(tokens)]))
        single = {"sequences": [row], REFERENCE: np.zeros(1)}
        inputs = self._prepare_inputs(self.data_collator([single] * size))
        del inputs[REFERENCE]
        return inputs

    def _complete_data(self, checkpoint: str | None) -> None:
        """Gives the pairs their reference."""
        self._read_or_compute("training", self.train_dataset, self._data_digest, checkpoint)
        if self._eval_digest is not None:
            self._read_or_compute("evaluation", self.eval_dataset, self._eval_digest, checkpoint)

    def forget_losses(self) -> None:
        """Drops the figures of losses outside of training."""
        self._figures = Figures()

    def _read_or_compute(self, words: str, pairs: Any, digest: str, checkpoint: str | None) -> None:
        """Gives pairs their reference: that of an earlier start, or computed by the model before its first step.

        Raises InvalidConfig if a run resumes, with a model that is trained already, and has none.
        """
        assert isinstance(pairs, PairData)
        file = reference.file_of(self._run_dir, self._job, digest)
        store = reference.Store(file, rank=self._rank, disk=self._disk, group=self._group)
        pairs.reference = store.read()
        if pairs.reference is not None:
            self._rank.say(f"reference log-probabilities of the {words} data: {file.name}")
        elif checkpoint is not None:
            raise reference.missing(file, checkpoint)
        else:
            many = counted(len(pairs), "pair")
            self._rank.say(f"computing reference log-probabilities of the {words} data: {many}")
            pairs.reference = store.write(self._computed(pairs))

    def _computed(self, pairs: PairData) -> reference.Array:
        """Returns the log-probabilities of all pairs under the model as it is; all ranks run it together."""
        engine: Any = self.model_wrapped
        batches = self.get_eval_dataloader(pairs)
        total, numbers = len(batches), itertools.count(1)

        def log_probs_of(batch: Mapping[str, Any]) -> torch.Tensor:
            self._heartbeat.count(Phase.REFERENCE, next(numbers), total)
            with self.compute_loss_context_manager():
                return self._objective.outputs(engine, self._prepare_inputs(dict(batch))).log_probs

        with trial(engine):
            found = reference.computed(batches, log_probs_of, num_pairs=len(pairs), group=self._group)
        self._heartbeat.send(self.state.global_step, Phase.LOADING)
        return found
