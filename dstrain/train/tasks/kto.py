"""Kahneman-Tversky optimization: desirable answers become more probable, and undesirable ones less.

Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306), equation
7; names and defaults are those of trl 1.16 trainer/kto_trainer.py: KTOTrainer._compute_loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dstrain.choices import LossOn
from dstrain.facts.data.datafile import Refuse
from dstrain.job.schema import Job
from dstrain.job.task_losses import Kto
from dstrain.train.data.sources import Rows
from dstrain.train.data.token_files import NUMBERS, TokenRow
from dstrain.train.data.tokenize import Encoded, Encoder
from dstrain.train.data.tokenized import Form, counts_of, with_files
from dstrain.train.tasks.log_probs import Answers, answers_of
from dstrain.train.tasks.pairs import place_of
from dstrain.train.tasks.samples import REFERENCE, SampleCollator, Samples, sequence_of

DESIRABLE = "desirable"
"""Key of the marks in a sample and in a micro-batch."""
_OTHER = "other_"
"""Prefix of the keys of prompts with the answers of other samples."""
_COLUMNS = {"input_ids": NUMBERS, "places": NUMBERS, DESIRABLE: NUMBERS}


def _encoded(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    for sample in encoder.encode(rows.conversations(refuse), refuse):
        yield with_files(_row(sample), sample, encoder)


def _row(sample: Encoded) -> TokenRow:
    teaches = sample.teaches
    return TokenRow(
        columns={
            "input_ids": sample.input_ids if teaches else [],
            "places": place_of(sample) if teaches else [],
            DESIRABLE: [sample.counts.desirable] if teaches else [],
        },
        length=len(sample.input_ids) if teaches else 0,
        num_learned=sample.num_learned,
        num_cut=sample.num_cut,
        counts=counts_of(sample.counts),
        where=sample.where,
    )


class MarkedSamples(Samples):
    """A data set of marked answers, each with its prompt and the answer of the sample before it.

    Their log-probabilities say how far the model has moved from the reference, whatever it is asked: the estimate of
    the KL divergence needs answers that do not belong to the prompts. LLaMA-Factory pairs them once as well; TRL takes
    those of the same micro-batch.
    """

    def __init__(self, dataset: Any) -> None:
        """`dataset` has a row for each sample: `input_ids`, `places` of the answer, and its mark."""
        super().__init__(dataset)
        self._longest = int(self.lengths().max())

    def lengths(self) -> Any:
        """Returns the tokens of each sample: (samples, 1). Those with another answer are cut to the longest one."""
        return np.asarray(self.dataset.with_format("numpy")["length"][:]).astype(np.int64)[:, None]

    def shown(self, index: int) -> list[dict[str, Any]]:
        """Returns the sample's own sequence."""
        return self._sequences(index)[:1]

    def _sequences(self, index: int) -> list[dict[str, Any]]:
        row, other = self.dataset[index], self.dataset[index - 1]  # that before the first one is the last one
        (start, end), (begin, stop) = row["places"], other["places"]
        ids = [*row["input_ids"][:start], *other["input_ids"][begin:]][: self._longest]
        mismatched = sequence_of(ids, start, min(start + stop - begin, len(ids)))
        return [sequence_of(row["input_ids"], start, end), mismatched]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the `sequences` of a sample, the mismatched one last, their `reference`, and the mark."""
        return super().__getitem__(index) | {DESIRABLE: self.dataset[int(index)][DESIRABLE][0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCollator(SampleCollator):
    """Collates samples into one micro-batch: own answers, and those of other samples under keys of their own."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tensors of `Collator` for each of both, `reference`, (2 × samples,), and marks, (samples,)."""
        own, *others = zip(*(sample["sequences"] for sample in samples), strict=True)
        batch = {**self.collator(own), REFERENCE: self.reference_of(samples)}
        for sequences in others:
            batch |= {f"{_OTHER}{name}": value for name, value in self.collator(sequences).items()}
            batch[DESIRABLE] = torch.tensor([bool(sample[DESIRABLE]) for sample in samples])
        return batch


MARKED = Form(columns=_COLUMNS, encoded=_encoded, whole=MarkedSamples, loss_on=LossOn.LAST)
"""Each sample is a sequence of which the last answer counts, and its mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedAnswers:
    """What a model says of a micro-batch."""

    own: Answers
    """Of the answers: (samples,)."""
    others: Answers
    """Of the answers of other samples, without gradients: (samples,)."""
    is_desirable: torch.Tensor
    """The marks: (samples,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoObjective:
    """KTO of a job; its second sequences have no gradient."""

    job: Job
    num_sequences: int = 2
    has_reference: bool = True
    form: Form = MARKED
    collates: type[SampleCollator] = MarkedCollator

    def outputs(self, model: Any, inputs: Mapping[str, Any]) -> MarkedAnswers:
        """Returns the log-probabilities of the answers, after those of the answers of other samples."""
        own = {name: value for name, value in inputs.items() if not name.startswith(_OTHER) and name != DESIRABLE}
        others = {name: inputs[f"{_OTHER}{name}"] for name in own if name != REFERENCE}
        with torch.no_grad():
            moved = answers_of(model, others, self.job.loss)
        with same_round(model):
            answers = answers_of(model, own, self.job.loss)
        return MarkedAnswers(own=answers, others=moved, is_desirable=inputs[DESIRABLE].bool())

    def log_probs(self, outputs: MarkedAnswers) -> torch.Tensor:
        """Returns the log-probabilities of all answers, those of other samples last: (2 × samples,)."""
        return torch.cat([outputs.own.log_probs, outputs.others.log_probs])

    def losses(self, outputs: MarkedAnswers, reference: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the loss of each answer, and TRL's figures of it: (samples,) each; all ranks call it together."""
        kto, (known, known_others) = self.job.kto, reference.to(outputs.own.log_probs.dtype).chunk(2)
        ratios = outputs.own.log_probs - known
        divergence = mean_divergence(outputs.others.log_probs - known_others, self.counts(outputs))
        rewards, log_probs = kto.beta * ratios.detach(), outputs.own.log_probs.detach()
        return {
            "loss": answer_losses(ratios, divergence, outputs.is_desirable, kto),
            "rewards/chosen": rewards,
            "rewards/rejected": rewards,
            "logps/chosen": log_probs,
            "logps/rejected": log_probs,
            "kl": divergence.expand_as(rewards),
        }

    def counts(self, outputs: MarkedAnswers) -> torch.Tensor:
        """Returns whether each sample has an answer: (samples,)."""
        return outputs.own.num_tokens > 0

    def among(self, outputs: MarkedAnswers) -> Mapping[str, torch.Tensor]:
        """Returns which samples are desirable, and which are not."""
        chosen = outputs.is_desirable
        return {f"{name}/{side}": mask for name in ("rewards", "logps") for side, mask in _sides(chosen)}


@contextmanager
def same_round(engine: Any) -> Iterator[None]:
    """Lets ZeRO-3 take a forward pass within it as a part of the round of passes that the last one began.

    It learns in which order a round of forward and backward passes needs parameters, to gather them ahead, and takes
    every forward pass for the beginning of a round. Two in each micro-batch would make it learn anew all the time.
    Source: deepspeed 0.19.8 runtime/zero/parameter_offload.py: _start_of_forward_hook.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        yield
        return
    coordinator = offload.get_param_coordinator()
    coordinator.reset_step = lambda: None
    try:
        yield
    finally:
        del coordinator.reset_step


def _sides(chosen: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    return ("chosen", chosen), ("rejected", ~chosen)


def mean_divergence(ratios: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the mean of log-ratios, (samples,), over the samples that count on all ranks, or 0 if it is below: ().

    It has no gradient.
    """
    totals = torch.stack([(ratios.detach() * counts).sum(), counts.to(ratios.dtype).sum()])
    if dist.is_initialized():
        dist.all_reduce(totals)
    return (totals[0] / totals[1].clamp(min=1)).clamp(min=0)


def answer_losses(ratios: torch.Tensor, divergence: torch.Tensor, is_desirable: torch.Tensor, kto: Kto) -> torch.Tensor:
    """Returns the loss of each answer: (samples,).

    `ratios`: log-probabilities over those of the reference, (samples,); `divergence`: that of the model from the
    reference, (); `is_desirable`: (samples,).
    """
    gains = kto.beta * (ratios - divergence)
    values = torch.where(is_desirable, gains, -gains).sigmoid()
    return torch.where(is_desirable, kto.desirable_weight, kto.undesirable_weight) * (1 - values)
