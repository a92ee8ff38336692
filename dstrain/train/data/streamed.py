"""Prepares a rank's data for streaming: the samples held out for evaluation, the first rows, and the stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data.columns import MEDIA
from dstrain.facts.data.media import named_in
from dstrain.facts.data.mixture import held_out_counts
from dstrain.job import task_limits
from dstrain.job.schema import Job
from dstrain.train.data.prepare import PreparedData
from dstrain.train.data.sources import EndlessRows, Text, endless_rows
from dstrain.train.data.stream import Stream, Window, held_in_memory
from dstrain.train.data.token_cache import fingerprint
from dstrain.train.data.tokenize import Encoded, Encoder
from dstrain.units import counted

if TYPE_CHECKING:
    from dstrain.train.data.media import MediaReader

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
        task_limits.require_for_media(job, sorted(media), packs=media_reader.positions is not None)
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
