"""Checks the samples before the first step: their labels, chat template, packed rows and generated texts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from dstrain.choices import LossOn, Task
from dstrain.errors import type_and_line
from dstrain.facts.data.messages import marked
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.monitor.outcomes import Check, CheckName
from dstrain.train.data.collate import PackedRows, Packing, row_of
from dstrain.train.data.pairs import PairData
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.show import pieces
from dstrain.train.data.sources import rows_of
from dstrain.train.data.tokenize import Encoder
from dstrain.train.generate import SamplesCallback
from dstrain.train.loss import mean_loss, trial
from dstrain.train.parts.training import Training
from dstrain.train.rank import of_all_ranks
from dstrain.train.tokenizer import load_tokenizer, source_of
from dstrain.units import counted

MOST_SAMPLES = 4
"""Samples of a row that are compared."""
_EXACT = 1e-3
"""Difference of two losses, over the loss, that the order of sums explains in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoss:
    """The mean loss per token of the same samples, computed twice."""

    packed: float
    """In one row."""
    alone: float
    """One by one."""
    targets: int
    """Tokens with loss."""
    targets_alone: int

    def agrees(self, tolerance: float) -> bool:
        """Returns whether both have the same targets and, up to a share of `tolerance`, the same loss.

        >>> PackedLoss(packed=2.0, alone=2.001, targets=9, targets_alone=9).agrees(1e-3)
        True
        """
        return self.targets == self.targets_alone and abs(self.packed - self.alone) <= tolerance * abs(self.alone)

    def found(self, count: int, tolerance: float, dtype: str) -> Check:
        """Judges packing by the losses of `count` samples."""
        figures = {"packed": self.packed, "alone": self.alone, "tolerance": tolerance}
        text = f"{count} samples have a loss of {self.packed:.5g} in one row, {self.alone:.5g} one by one"
        passed = self.agrees(tolerance)
        if self.targets != self.targets_alone:
            text += f": {self.targets:,} tokens have loss there, {self.targets_alone:,} here"
        elif not passed:
            text += f": rounding in {dtype} explains {tolerance:.1%}"
        return Check(name=CheckName.PACKING, passed=passed, text=text, figures=figures)


def tolerance(dtype: torch.dtype, *, tf32: bool) -> float:
    """Returns the share by which two losses of the same tokens may differ when a model computes in `dtype`.

    A loss is a difference of logits, each of which is rounded to half a unit in the last place in every layer; four
    units leave room for kernels that sum in another order. In bf16 that is 3 %: samples that see each other are found
    by `isolation.Trial`, to the last bit.

    >>> tolerance(torch.float32, tf32=False), tolerance(torch.bfloat16, tf32=False)
    (0.001, 0.03125)
    """
    eps = 2**-10 if tf32 and dtype == torch.float32 else torch.finfo(dtype).eps
    return max(_EXACT, 4 * eps)


def some_samples(data: Any) -> list[int]:
    """Returns the first samples of the first row that holds several; none if every row holds one."""
    rows = data.rows if isinstance(data, PackedRows) else ()
    row = next((row for row in rows if len(row) > 1), ())
    return [int(sample) for sample in row[:MOST_SAMPLES]]


def compare_samples(
    data: PackedRows,
    members: list[int],
    *,
    batch_of: Callable[[Any], Mapping[str, Any]],
    totals_of: Callable[[Mapping[str, Any]], torch.Tensor],
    group: Any,
) -> PackedLoss:
    """Returns the losses of some samples in one row and one by one; collective over `group`, a gloo group of all ranks.

    `batch_of` returns the micro-batch of a row, and `totals_of` the sum of its losses and its targets: (2,), float64.
    """

    def row_of(*samples: int) -> Any:
        return PackedRows(samples=data.samples, rows=Packing.of([samples]))[0]

    packed, targets = mean_loss(totals_of, [batch_of(row_of(*members))], group)
    alone, targets_alone = mean_loss(totals_of, [batch_of(row_of(sample)) for sample in members], group)
    return PackedLoss(packed=packed, alone=alone, targets=targets, targets_alone=targets_alone)


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


def compare_template(trainer: Training, *, vocab_size: int | None) -> Check | None:
    """Returns whether the model knows the job's template as well as its own; None if both write the same.

    All ranks run it together; rank 0 reads the samples.
    """
    pairs = of_all_ranks(_pairs(trainer) if trainer.rank.is_first else None, trainer.group)[0]
    if isinstance(pairs, str):
        return Check(name=CheckName.TEMPLATE, passed=True, text=f"the model's own is not compared: {pairs}")
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

    def found(self, vocab_size: int | None) -> Check:
        """Returns the finding from the losses."""
        job, own = statistics.mean(self.job), statistics.mean(self.own)
        text = f"answers of {counted(len(self.job), 'conversation')} have a loss of {job:.4g} per token in the job's, "
        text += f"{own:.4g} in the model's own"
        knows_neither = vocab_size is not None and not min(job, own) < _GUESSING * math.log(vocab_size)
        passed = knows_neither or not self.is_higher
        if knows_neither:
            text += ": the model knows neither"
        elif not passed:
            text += ": the model does not know it; remove chat_template from the job, and it trains in its own"
        return Check(name=CheckName.TEMPLATE, passed=passed, text=text, figures={"job": job, "own": own})


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
        for where, sample in islice(rows_of(source, job, training=True).parsed(lambda _: None), _READ):
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


NUM_TOKENS = 4
"""At most as many as `max_new_tokens`: the first reads the prompt, the others the cache of keys and values."""


def samples_of(trainer: Training) -> list[SamplesCallback]:
    """Returns the generator of a run's texts, if it has one."""
    callbacks: Any = trainer.callback_handler.callbacks
    return [callback for callback in callbacks if isinstance(callback, SamplesCallback)]


def try_generation(trainer: Training, samples: SamplesCallback, group: Any) -> Check:
    """Generates from the longest prompt on all ranks; an error of any ends the run, running out of memory included.

    `group`: a gloo group of all ranks; None with one.
    """
    error: Exception | None = None
    sample = None
    try:
        with trial(trainer.model_wrapped):
            sample = samples.rehearse(NUM_TOKENS)
    except torch.OutOfMemoryError:  # has a report of its own
        raise
    except Exception as caught:  # generation is code of the model's family
        error = caught
    reasons = of_all_ranks(None if error is None else type_and_line(error), group)
    if (reason := next((reason for reason in reasons if reason), None)) is not None:
        return Check(name=CheckName.GENERATION, passed=False, text=f"samples: the model cannot generate: {reason}")
    assert sample is not None
    text = f"{counted(sample.tokens, 'token')} after the longest prompt of {counted(samples.longest_prompt, 'token')}"
    return Check(name=CheckName.GENERATION, passed=True, text=text)


_TOKENS_BEFORE, _TOKENS = 40, 120
"""Tokens that are decoded before the first one with loss, and in all."""
_SHOWN = 160
"""Characters of a sample in the log."""


def examples(data: Any, tokenizer: Any, count: int) -> Iterator[tuple[str, bool]]:
    """Yields the first samples of a data set around their first text with loss, each sequence in one line, and whether
    any of its tokens has loss."""
    samples = data.samples.with_format(None) if isinstance(data, PackedRows) else data
    for number in range(min(count, len(samples))):
        for sequence in samples.sequences(number) if isinstance(samples, PairData) else [samples[number]]:
            labels = sequence["labels"]
            yield _example(tokenizer, sequence["input_ids"], labels), any(label != IGNORED for label in labels)


def _example(tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int]) -> str:
    first = next((index for index, label in enumerate(labels) if label != IGNORED), 0)
    start = max(0, first - _TOKENS_BEFORE)
    part = slice(start, start + _TOKENS)
    text = marked(list(pieces(tokenizer, input_ids[part], labels[part]))).replace("\n", "⏎")
    begin = max(0, text.find("⟦") - _SHOWN // 3)
    end = begin + _SHOWN
    has_more = end < len(text) or part.stop < len(input_ids)
    return ("…" if start or begin else "") + text[begin:end] + ("…" if has_more else "")
