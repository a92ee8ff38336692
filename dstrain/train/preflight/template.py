"""Compares the loss of answers in the job's chat template with their loss in the model's own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from dstrain.choices import LossOn, Task
from dstrain.errors import type_and_line
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.train.data.packing import row_of
from dstrain.train.data.sources import rows_of
from dstrain.train.data.tokenize import Encoder
from dstrain.train.evaluation import mean_loss
from dstrain.train.loss import trial
from dstrain.train.preflight.found import Found
from dstrain.train.rank import of_all_ranks
from dstrain.train.tokenizer import load_tokenizer, source_of
from dstrain.train.training import Training
from dstrain.units import counted

MOST_CONVERSATIONS = 8
"""Conversations that are compared, each in both templates."""
_READ = 64
"""Samples among which they are looked for."""
_CLEAR = 0.1
"""Smallest loss increase (nats per token) that is reported, if it also exceeds two standard errors. A choice."""
_GUESSING = 0.75
"""Share of ln(vocabulary) above which a model has learned too little to know a template."""

Sample = tuple[list[int], list[int]]
"""Token ids and labels."""
Pair = tuple[Sample, Sample]
"""A conversation in the job's template and in the model's own."""


def has_choice(job: Job) -> bool:
    """Returns whether a job has a template of its own, of conversations with answers that the model learns."""
    return job.chat_template is not None and job.task is not Task.DPO


def compare(trainer: Training, *, vocab_size: int | None) -> Found | None:
    """Returns whether the model knows the job's template as well as its own; None if both write the same.

    All ranks run it together; rank 0 reads the samples.
    """
    pairs = of_all_ranks(_pairs(trainer) if trainer.rank.is_first else None, trainer.group)[0]
    if isinstance(pairs, str):
        return Found(passed=True, text=f"the model's own is not compared: {pairs}")
    if not pairs:
        return None
    losses = Losses(
        job=tuple(_loss(trainer, sample) for sample, _ in pairs),
        own=tuple(_loss(trainer, sample) for _, sample in pairs),
    )
    return losses.found(vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Mean losses per token of the answers of each conversation."""

    job: Sequence[float]
    """In the job's template."""
    own: Sequence[float]
    """In the model's own."""

    @property
    def is_higher(self) -> bool:
        """Whether the job's loss is clearly higher, as a paired difference.

        >>> Losses(job=(2.1, 2.4, 1.9), own=(1.2, 1.6, 1.1)).is_higher
        True
        >>> Losses(job=(2.1, 0.4, 1.9), own=(1.2, 1.6, 1.1)).is_higher
        False
        """
        differences = [job - own for job, own in zip(self.job, self.own, strict=True)]
        if len(differences) < 2:
            return False
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return statistics.mean(differences) > max(_CLEAR, 2 * error)

    def found(self, vocab_size: int | None) -> Found:
        """Returns the finding from the losses."""
        job, own = statistics.mean(self.job), statistics.mean(self.own)
        text = f"answers of {counted(len(self.job), 'conversation')} have a loss of {job:.4g} per token in the job's, "
        text += f"{own:.4g} in the model's own"
        figures = {"job": job, "own": own}
        if vocab_size is not None and not min(job, own) < _GUESSING * math.log(vocab_size):
            return Found(passed=True, text=f"{text}: the model knows neither", figures=figures)
        if not self.is_higher:
            return Found(passed=True, text=text, figures=figures)
        why = "the model does not know it; remove chat_template from the job, and it trains in its own"
        return Found(passed=False, text=f"{text}: {why}", figures=figures)


def _pairs(trainer: Training) -> list[Pair] | str:
    """Returns conversations in both templates, or why there are none; none if every one is the same in both."""
    job = trainer.job
    try:
        own = load_tokenizer(replace(job, chat_template=None), source_of(job))
        if not own.chat_template or own.chat_template == job.chat_template:
            return []
        chats = list(islice(_conversations(job), MOST_CONVERSATIONS))
        both = [_encoded(tokenizer, chats, job) for tokenizer in (trainer.processing_class, own)]
    except Exception as error:  # a template is a program of the model's author, and a hub may not answer
        return type_and_line(error)
    pairs = [(both[0][where], both[1][where]) for where in both[0] if where in both[1]]
    return [] if all(ours == theirs for ours, theirs in pairs) else pairs


def _conversations(job: Job) -> Iterator[tuple[str, Conversation]]:
    """Yields conversations without images and videos among the first samples of each data set."""
    for source in job.train_sources:
        for where, sample in islice(rows_of(source, job, training=True).conversations(lambda _: None), _READ):
            if isinstance(sample, Conversation) and not sample.has_media:
                yield where, sample


def _encoded(tokenizer: Any, chats: list[tuple[str, Conversation]], job: Job) -> dict[str, Sample]:
    """Returns the conversations that a template takes, in tokens with labels on the answers, by place."""
    encoder = Encoder(tokenizer=tokenizer, seq_len=job.seq_len, loss_on=LossOn.ANSWER, thinking=job.thinking)
    return {
        encoded.where: (encoded.input_ids, encoded.labels)
        for encoded in encoder.encode(chats, lambda _: None)
        if encoded.teaches and not encoded.num_cut
    }


def _loss(trainer: Training, sample: Sample) -> float:
    """Returns the mean loss of a sample, the same one on all ranks."""
    tokens, labels = map(np.asarray, sample)
    row = row_of(tokens, labels, np.array([len(tokens)]))
    engine: Any = trainer.model_wrapped
    with trial(engine):
        batch = trainer.data_collator([row] * trainer.trial_size())
        return mean_loss(lambda each: trainer.totals(engine, each), [batch], trainer.group)[0]
