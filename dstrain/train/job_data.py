"""Loads the tokenizer and the data of a job, prepared or streamed: for every rank and for `dstrain data prepare`.

`python -m dstrain.train.job_data` tokenizes the data into the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TextIO

from dstrain.choices import Task
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.data.columns import MEDIA
from dstrain.facts.data.media import named_in
from dstrain.facts.data.messages import Prepared, PrepareMessage, Progress
from dstrain.job import limits
from dstrain.job.data_source import held_out_counts
from dstrain.job.schema import Job
from dstrain.records import from_data, to_data
from dstrain.train.data.media import MediaReader, load_media_reader
from dstrain.train.data.pairs import PAIRS
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.data.sources import EndlessRows, Text, endless_rows
from dstrain.train.data.stream import Stream, Window, held_in_memory
from dstrain.train.data.token_cache import Report, cache_folder, fingerprint
from dstrain.train.data.tokenize import SEQUENCES, Encoded, Encoder, with_media
from dstrain.train.tokenizer import load_tokenizer, source_of
from dstrain.units import counted

_FIRST_SAMPLES = 64
"""Samples on which a model is tried before its first step."""
_BATCH_SAMPLES = 64
_SEEN_PARTS, _SEEN_ROWS = 256, 8
"""Parts, and rows of each, of which images and videos are looked for before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedData:
    """Training data that is tokenized as training goes."""

    dataset: Stream
    notes: tuple[str, ...]
    """Lines for the log."""
    digest: str
    """Changes with the rows and their order."""
    media: frozenset[str] = frozenset()
    """The columns of images and videos that a sample has."""


def streamed(
    job: Job, tokenizer: Any, media_reader: MediaReader | None = None
) -> tuple[StreamedData, PreparedData | None]:
    """Returns the training data of a job as a stream, and with `val_split` the first samples for evaluation.

    Reads these and a few more. Raises InvalidConfig with file and place for an unusable row among them.
    """
    settings: dict[str, Any] = {"loss_on": job.loss_on, "thinking": job.thinking}
    encoder = Encoder(tokenizer=tokenizer, seq_len=job.seq_len, media_reader=media_reader, **settings)
    data, held_out = endless_rows(job), None
    digest, media = _digest(job, encoder, data), _media(data) if media_reader is not None else frozenset()
    if media_reader is not None and media:
        limits.require_for_media(job, sorted(media), packs=media_reader.positions is not None)
    usable = partial(_usable, job, encoder, media)
    if job.val_split is not None:
        data, samples = _without_held_out(job, usable, data)
        held_out = _evaluation(job, samples, f"{digest}-eval")
    first = list(islice(usable(text for rows in data for text in _in_order(rows)), _FIRST_SAMPLES))
    if not first:
        problem = f"no sample has a token of an answer among its first {job.seq_len:,}"
        raise InvalidConfig(f"{data[0].sets[0].name}: {problem}", hint="Raise seq_len.")
    stream = Stream(data, encoder, job, held_in_memory(first, job), media)
    return StreamedData(dataset=stream, notes=(_note(job, data),), digest=digest, media=media), held_out


def _media(data: Sequence[EndlessRows]) -> frozenset[str]:
    """Returns which of images and videos the data have, by the first rows of parts all over the files or shards.

    All ranks run the tower for these in every micro-batch, so all must know before the first one.
    """
    chunks = [(rows.sets[chunk.rows], chunk) for rows in data for chunk in rows.chunks]
    found = set[str]()
    for rows, chunk in chunks[:: -(-len(chunks) // _SEEN_PARTS)]:
        first = islice(rows.origins[chunk.origin].samples(lambda error: None, chunk.part), _SEEN_ROWS)
        found.update(name for row in first for name in named_in(rows.reading.row(row.row)))
    return frozenset(found)


def _note(job: Job, data: Sequence[EndlessRows]) -> str:
    sets = ", ".join(one.name for one in data[0].sets)
    number = sum(len(rows.chunks) for rows in data)
    shuffled = f"every reader shuffles {job.shuffle_buffer:,} samples at a time"
    return f"{sets}: streamed in {counted(number, 'part')}; {shuffled}"


def _digest(job: Job, encoder: Encoder, data: Sequence[EndlessRows]) -> str:
    sets = [fingerprint(rows, encoder, job, ()) for rows in data[0].sets]
    order = [job.seed, job.packing, job.shuffle_buffer, job.on_long_sample.value, job.val_split]
    made_from = json.dumps([sets, order, [[rows.weight, len(rows.chunks)] for rows in data]])
    return hashlib.sha256(made_from.encode()).hexdigest()[:16]


def _in_order(rows: EndlessRows) -> Iterator[Text]:
    """Yields all samples in the order of the files."""
    for chunk in rows.chunks:
        yield from rows.read(chunk, lambda error: None)  # the readers of the stream tell


def _usable(job: Job, encoder: Encoder, media: frozenset[str], texts: Iterable[Text]) -> Iterator[Encoded]:
    """Yields the samples that are trained on."""
    left = iter(texts)
    while batch := list(islice(left, _BATCH_SAMPLES)):
        window = Window(job, encoder, media)
        window.add(batch)
        yield from window.encoded


def _without_held_out(
    job: Job, usable: Callable[[Iterable[Text]], Iterator[Encoded]], data: Sequence[EndlessRows]
) -> tuple[list[EndlessRows], list[Encoded]]:
    """Returns the data without the parts that hold the first `val_split` samples, and these samples.

    Data sets have as many as their weights say, or as their bytes.
    """
    assert job.val_split is not None
    counts = held_out_counts(_sizes(data), job.val_split)
    samples: list[Encoded] = []
    dropped = set()
    for rows in data:
        for index in sorted({chunk.rows for chunk in rows.chunks}):
            own = [chunk for chunk in rows.chunks if chunk.rows == index]
            parts = (replace(rows, chunks=(chunk,)) for chunk in own)
            wanted = counts[index]
            for chunk, part in zip(own, parts, strict=True):
                if wanted <= 0:
                    break
                found = list(islice(usable(_in_order(part)), wanted))
                samples += found
                wanted -= len(found)
                # a chunk is left out whole: its other samples are not trained on, which needs no record by sample
                dropped.add(chunk)
            if wanted or len(dropped & set(own)) == len(own):
                name = rows.sets[index].name
                problem = f"val_split holds out {counts[index]:,} samples of {name}, which leaves none to train on"
                raise InvalidConfig(problem, hint="Write a smaller number, or name other data as eval_data.")
    left = [replace(rows, chunks=tuple(chunk for chunk in rows.chunks if chunk not in dropped)) for rows in data]
    return left, samples


def _sizes(data: Sequence[EndlessRows]) -> list[int]:
    """Returns the relative sizes of data sets. Raises InvalidConfig for the data sets of a hub."""
    origins = [[origin.path for origin in rows.origins] for rows in data[0].sets]
    if any(path is None for paths in origins for path in paths):
        raise InvalidConfig(
            "val_split holds out samples of files, not of a hub's stream", hint="Set eval_data instead."
        )
    if len(data) > 1:
        total = sum(rows.weight for rows in data)
        return [max(1, int(2**60 * rows.weight / total)) for rows in data]
    return [2**20 * sum(path.stat().st_size for path in paths if path) for paths in origins]


def _evaluation(job: Job, samples: Sequence[Encoded], digest: str) -> PreparedData:
    lengths = [len(sample.input_ids) for sample in samples]
    learned = sum(sample.num_learned for sample in samples)
    note = f"val_split {job.val_split:g}: the first {len(samples):,} samples are held out for evaluation"
    return PreparedData(
        dataset=held_in_memory(samples, job),
        num_samples=len(samples),
        num_tokens=sum(lengths),
        num_learned=learned,
        notes=(note,),
        digest=digest,
        media=frozenset(name for sample in samples for name in MEDIA if getattr(sample, name)),
        num_made=0,
        folders=(),
    )


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

    limits.require(job)
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
