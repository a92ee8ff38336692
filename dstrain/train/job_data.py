"""Loads the tokenizer and the data of a job: the same for every rank and for `dstrain data prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from dstrain.choices import Task
from dstrain.job.schema import Job
from dstrain.train.data.media import MediaReader, load_media_reader
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.data.streamed import StreamedData, streamed
from dstrain.train.data.tokenized import SEQUENCES, Report, with_media
from dstrain.train.preferences.pairs import PAIRS
from dstrain.train.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class JobData:
    """The tokenizer and the data of a job."""

    tokenizer: Any
    media_reader: MediaReader | None
    """Reads images and videos; None: the model has no tower."""
    train: PreparedData | StreamedData
    eval: PreparedData | None

    @property
    def notes(self) -> list[str]:
        """Lines for the log."""
        return [note for data in (self.train, self.eval) if data for note in data.notes]


def load(job: Job, source: str, report: Report) -> JobData:
    """Returns the data of a job; `source` has its tokenizer.

    Raises InvalidConfig with file and line for an unusable row.
    """
    tokenizer = load_tokenizer(job, source)
    media_reader = load_media_reader(job, source, tokenizer)
    form = PAIRS if job.task is Task.DPO else SEQUENCES
    form = with_media(form, media_reader) if media_reader else form
    tokens = partial(prepare, job, tokenizer, report=report, form=form)
    if job.streaming:
        stream, held_out = streamed(job, tokenizer, media_reader)
        own = tokens(training=False) if job.eval_data is not None else held_out
        return JobData(tokenizer=tokenizer, media_reader=media_reader, train=stream, eval=own)
    train = tokens(training=True)
    return JobData(
        tokenizer=tokenizer,
        media_reader=media_reader,
        train=train,
        eval=tokens(training=False) if job.has_eval else None,
    )
