"""Loads the tokenizer and the data of a job: the same for every rank and for `dstrain data prepare`.

`python -m dstrain.train.job_data` tokenizes the data into the cache.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from dstrain.choices import Task
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.data.messages import Prepared, PrepareMessage, Progress
from dstrain.job import task_limits
from dstrain.job.schema import Job
from dstrain.records import from_data, to_data
from dstrain.train.data.media import MediaReader, load_media_reader
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.data.streamed import StreamedData, streamed
from dstrain.train.data.token_cache import Report, cache_folder
from dstrain.train.data.token_rows import SEQUENCES, with_media
from dstrain.train.preferences.pairs import PAIRS
from dstrain.train.tokenizer import load_tokenizer, source_of


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


def fill(job: Job, out: TextIO) -> Prepared:
    """Tokenizes what is not in the cache yet, and returns the counts of a job's data; writes progress to `out`."""

    def report(name: str, done: int, total: int) -> None:
        try:
            _write(PrepareMessage(progress=Progress(name=name, done=done, total=total)), out)
        except BrokenPipeError:  # the command was killed
            os._exit(1)

    task_limits.require(job)
    if job.streaming:
        raise InvalidConfig("streaming is true: nothing is tokenized ahead of the run", hint="streaming: false")
    data = load(job, source_of(job), report)
    assert isinstance(data.train, PreparedData)
    both = [data.train, *([data.eval] if data.eval is not None else [])]
    return Prepared(
        num_samples=data.train.num_samples,
        num_tokens=data.train.num_tokens,
        num_learned=data.train.num_learned,
        num_made=sum(one.num_made for one in both),
        folders=tuple(dict.fromkeys(str(folder) for one in both for folder in one.folders)),
        cache=str(cache_folder()),
        cache_bytes=sum(file.stat().st_size for file in cache_folder().rglob("*") if file.is_file()),
        notes=tuple(data.notes),
    )


def _write(message: PrepareMessage, out: TextIO) -> None:
    print(json.dumps(to_data(message)), file=out, flush=True)


def main() -> int:
    """Prepares the job on standard input; returns the exit code. Errors go to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    job = from_data(Job, json.load(sys.stdin), locate=lambda place: "/".join(map(str, place)))
    try:
        _write(PrepareMessage(prepared=fill(job, out)), out)
    except DstrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
