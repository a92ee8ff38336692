"""Tokenizes the data of a job into the cache: `python -m dstrain.train.fill_cache`, for `dstrain data prepare`.

It reads a `Job` as JSON and writes a `PrepareMessage` a line. The model itself is not loaded.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.data.prepared import Prepared, PrepareMessage, Progress
from dstrain.job import task_limits
from dstrain.job.schema import Job
from dstrain.records import from_data, to_data
from dstrain.train import job_data
from dstrain.train.data.prepare import PreparedData
from dstrain.train.data.tokenized import cache_folder
from dstrain.train.tokenizer import source_of


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
    data = job_data.load(job, source_of(job), report)
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
