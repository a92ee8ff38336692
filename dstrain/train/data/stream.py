"""A stream of training rows without an end: read, tokenized and packed as training goes, from any place on, which
checkpoints keep.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from dstrain import units
from dstrain.choices import OnBadRow, OnLongSample
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts.data.columns import IMAGES, VIDEOS, unusable
from dstrain.facts.data.turns import Conversation
from dstrain.job import limits
from dstrain.job.schema import Job
from dstrain.paths import write_atomic
from dstrain.train.data.collate import PackedRows, packed, row_of
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.sources import EndlessRows, Reader, RowPlace, Text
from dstrain.train.data.tokenize import MEDIA_TYPES, NUMBERS, Encoded, Encoder, counted, counts_of
from dstrain.train.rank import of_all_ranks

STREAM = "dstrain_stream"
"""Key of the place in a row and in a micro-batch; the Trainer removes it."""
_BATCH_SAMPLES = 64
"""Samples that are tokenized at a time."""
_PACKED_ROWS = 64
"""Rows that are packed at a time: the last one is not full, which is half a row of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a reader of a stream is."""

    block: int = 0
    """Number of its block."""
    rows: tuple[RowPlace, ...]
    """Where the block begins, in each of the data sets."""
    begin: int = 0
    """Sample of the block, in its random order, with which the window begins that is tokenized together."""
    done: int = 0
    """Rows of the window that were trained on."""
    reached: int = -1
    """The last part that was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The place after a row or a micro-batch, and the counts that it adds."""

    reader: int
    place: Place
    """After the row."""
    counts: Counter[str]
    """`samples`, `tokens`, `learned`, `long`, `untaught`, `skipped` and the fields of `chat.Counts` → numbers."""
    problems: tuple[str, ...] = ()
    """Of skipped rows."""


class Window:
    """Samples that are tokenized together, and their counts."""

    def __init__(self, job: Job, encoder: Encoder, media: frozenset[str]) -> None:
        """Starts without samples; `media`: the columns of images and videos that samples may have."""
        self._job = job
        self._encoder = encoder
        self._media = media
        self.encoded: list[Encoded] = []
        """Those that are trained on."""
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def refuse(self, error: InvalidConfig) -> None:
        """Raises the error of an unusable row, or counts it."""
        if self._job.on_bad_row is OnBadRow.STOP:
            raise error
        self.counts["skipped"] += 1
        self.problems.append(str(error.problem))

    def add(self, texts: Sequence[Text]) -> None:
        """Tokenizes samples, and keeps those with something to learn; conversations and texts may be mixed."""
        texts = [text for text in texts if self._is_expected(*text)]
        place = {where: number for number, (where, _) in enumerate(texts)}
        kinds = [[text for text in texts if isinstance(text[1], str) == is_text] for is_text in (False, True)]
        encoded = [one for kind in kinds for one in self._encoder.encode(kind, self.refuse)]
        for sample in sorted(encoded, key=lambda one: place[one.where]):
            self.counts.update(counts_of(sample.counts))
            self.counts["long"] += sample.num_cut > 0
            drops = sample.num_cut > 0 and self._job.on_long_sample is OnLongSample.DROP
            if not sample.teaches or drops:
                self.counts["untaught"] += not sample.teaches
                continue
            self.encoded.append(sample)
            self.counts["samples"] += 1
            self.counts["tokens"] += len(sample.input_ids)
            self.counts["learned"] += sample.num_learned

    def _is_expected(self, where: str, sample: Conversation | str) -> bool:
        """Returns whether a sample has no images or videos but such as all ranks run the tower for; others are refused,
        as is any in a job that cannot train on them."""
        if isinstance(sample, str) or not sample.has_media:
            return True
        media_reader = self._encoder.media_reader
        packs = media_reader is not None and media_reader.positions is not None
        limits.require_for_media(self._job, sample.media, packs=packs)
        others = [name for name in sample.media if name not in self._media]
        if others and media_reader is not None:
            problem = f"{where}: has {' and '.join(others)}, which no row has that was read before training"
            self.refuse(
                InvalidConfig(problem, hint=f"Begin the first file of the data with a row that has {others[0]}.")
            )
        return not others or media_reader is None

    def rows(self, seed: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yields the samples, or with packing rows of them."""
        if not self._job.packing:
            for sample in self.encoded:
                yield {"input_ids": sample.input_ids, "labels": sample.labels, **_files([sample], self._media)}
        elif self.encoded:
            lengths = np.array([len(sample.input_ids) for sample in self.encoded])
            for members in packed(lengths, self._job.seq_len, seed=seed):
                samples = [self.encoded[index] for index in members]
                ids, labels = (
                    np.concatenate([np.array(getattr(sample, name), np.int32) for sample in samples])
                    for name in ("input_ids", "labels")
                )
                yield row_of(ids, labels, lengths[members]) | _files(samples, self._media)


def _files(samples: Sequence[Encoded], media: Iterable[str]) -> dict[str, list[Any]]:
    """Returns the files of the images and videos of a row's samples, in the order of their tokens."""
    return {name: [file for sample in samples for file in getattr(sample, name)] for name in media}


class Stream(IterableDataset[Any]):
    """The training rows of the readers of one rank; the Trainer says where each one begins."""

    def __init__(
        self, data: Sequence[EndlessRows], encoder: Encoder, job: Job, first_rows: Any, media: frozenset[str]
    ) -> None:
        """`first_rows` are the first ones of the data, on which a model is tried; `media`: see `Window`."""
        self.data = data
        self._encoder = encoder
        self._job = job
        self._media = media
        self.first_rows = first_rows
        self.num_readers = 1
        """Of all ranks."""
        self.places: dict[int, Place] = {}
        """Where each reader of this rank begins, in the order in which they make micro-batches."""

    def start(self, reader: int, part: int = 0) -> Place:
        """Returns where a reader begins with the parts from one on."""
        first = part + (reader - part) % self.num_readers
        return Place(rows=tuple(RowPlace(first) for _ in self.data))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores
        reader, place = list(self.places.items())[worker.id if worker is not None else 0]
        try:
            yield from self._rows(reader, place)
        except DstrainError as error:
            yield error  # on its way to the process that trains: PyTorch would make a traceback of it

    def longest(self) -> dict[str, Any]:
        """Returns a row that is as heavy as any text: one sample of `seq_len` tokens, all of which count.

        It begins with the row of the first ones that has the most tokens with images or videos, if one has any.
        """
        rows = [self.first_rows[index] for index in range(len(self.first_rows))]
        row = max(rows, key=lambda row: len(row["input_ids"]) * any(row.get(name) for name in self._media))
        begin, labels = (np.asarray(row[name], np.int32) for name in ("input_ids", "labels"))
        tokens = np.concatenate([begin, np.resize(begin[labels != IGNORED], self._job.seq_len - len(begin))])
        return row_of(tokens, tokens, np.array([len(tokens)])) | {name: row[name] for name in self._media}

    def _rows(self, reader: int, place: Place) -> Iterator[dict[str, Any]]:
        """Yields the rows after a place, each with the place after it."""
        job, seed = self._job, self._job.seed
        reading = Reader(
            data=self.data, index=reader, count=self.num_readers, block_samples=job.shuffle_buffer, seed=seed
        )
        read = Window(job, self._encoder, self._media)  # counts unusable rows
        for block in reading.blocks(place.block, place.rows, read.refuse):
            counts, problems = _drained(read)
            begin, done = (place.begin, place.done) if block.number == place.block else (0, 0)
            if begin or done:  # counted by the rows before
                counts, problems = Counter(), ()
            while begin < len(block.texts):
                window, end = self._window(block.texts, begin)
                if not done:
                    counts += window.counts
                    problems += tuple(window.problems)
                for number, row in enumerate(window.rows([seed, reader, block.number, begin]), start=1):
                    if number > done:
                        at = Place(
                            block=block.number, rows=block.places, begin=begin, done=number, reached=block.reached
                        )
                        yield {**row, STREAM: Tick(reader=reader, place=at, counts=counts, problems=problems)}
                        counts, problems = Counter(), ()
                begin, done = end, 0

    def _window(self, texts: Sequence[Text], begin: int) -> tuple[Window, int]:
        """Returns the window from a sample on, and the sample after it."""
        window, end = Window(self._job, self._encoder, self._media), begin
        tokens = _PACKED_ROWS * self._job.seq_len if self._job.packing else 1
        while end < len(texts) and window.counts["tokens"] < tokens:
            window.add(texts[end : end + _BATCH_SAMPLES])
            end += _BATCH_SAMPLES
        return window, end


def _drained(window: Window) -> tuple[Counter[str], tuple[str, ...]]:
    """Returns the counts of unusable rows, which begin anew."""
    counts, problems = window.counts, tuple(window.problems)
    window.counts, window.problems = Counter(), []
    return counts, problems


class StreamCollator:
    """Adds to a micro-batch of a stream the places after its rows."""

    def __init__(self, collator: Callable[[Any], dict[str, Any]]) -> None:
        """`collator` builds the tensors."""
        self.collator = collator

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Returns the micro-batch; rows that are not of a stream are collated as always."""
        failure = next((row for row in rows if isinstance(row, DstrainError)), None)
        if failure is not None:
            return {STREAM: failure}
        ticks = [row[STREAM] for row in rows if STREAM in row]
        batch = self.collator([{key: row[key] for key in row if key != STREAM} for row in rows])
        if ticks:
            batch[STREAM] = Tick(
                reader=ticks[-1].reader,
                place=ticks[-1].place,
                counts=sum((tick.counts for tick in ticks), Counter()),
                problems=tuple(problem for tick in ticks for problem in tick.problems),
            )
        return batch


def held_in_memory(encoded: Sequence[Encoded], job: Job) -> Any:
    """Returns a few samples as data for the Trainer: a data set, or packed rows."""
    columns: dict[str, Any] = {
        "input_ids": [sample.input_ids for sample in encoded],
        "labels": [sample.labels for sample in encoded],
        "length": [len(sample.input_ids) for sample in encoded],
        IMAGES: [list(sample.images) for sample in encoded],
        VIDEOS: [list(map(list, sample.videos)) for sample in encoded],
    }
    numbers = {"input_ids": NUMBERS, "labels": NUMBERS, "length": datasets.Value("int32")}
    features = datasets.Features({**numbers, **{name: MEDIA_TYPES[name] for name in (IMAGES, VIDEOS)}})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    if not job.packing:
        return dataset
    rows = packed(np.array(columns["length"]), job.seq_len, seed=job.seed)
    return PackedRows(samples=dataset.with_format("arrow"), rows=rows)


_FILE = "stream-*.json"
_SHOWN_PROBLEMS = 5


class StreamProgress:
    """The progress of one rank in the stream, from which its readers continue after a resume."""

    def __init__(self, stream: Stream, digest: str, *, rank: int, num_ranks: int, workers: int) -> None:
        """`digest` changes with the rows and their order; `workers` are the processes of this rank's data loader."""
        self._stream = stream
        self._digest = digest
        self._rank = rank
        self._per_rank = max(1, workers)
        stream.num_readers = num_ranks * self._per_rank
        stream.places = {reader: stream.start(reader) for reader in self._own}
        self._next = 0  # index of the reader that makes the next micro-batch
        self.counts: Counter[str] = Counter()
        """Of all rows read: see `Tick`."""
        self.problems: list[str] = []
        """The first ones of skipped rows."""

    @property
    def places(self) -> Mapping[int, Place]:
        """Where each reader of this rank is."""
        return self._stream.places

    @property
    def _own(self) -> range:
        return range(self._rank * self._per_rank, (self._rank + 1) * self._per_rank)

    def noted(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields micro-batches without their places, which it notes. Raises the error of an unusable row."""
        for batch in batches:
            tick = batch.pop(STREAM)
            if isinstance(tick, DstrainError):
                raise tick
            self._stream.places[tick.reader] = tick.place
            self._next = (self._next + 1) % self._per_rank
            self.counts.update(tick.counts)
            self.problems += tick.problems[: _SHOWN_PROBLEMS - len(self.problems)]
            yield batch

    def save(self, checkpoint: Path) -> None:
        """Writes where the readers of this rank are; all micro-batches that were noted have been trained on."""
        places = {reader: asdict(place) for reader, place in self._stream.places.items()}
        state = {
            "digest": self._digest,
            "readers": self._stream.num_readers,
            "per_rank": self._per_rank,
            "next": self._next,
            "places": places,
            "counts": self.counts,
            "problems": self.problems,
        }
        write_atomic(checkpoint / _FILE.replace("*", f"{self._rank:05}"), json.dumps(state) + "\n")

    def report(self, group: Any, job: Job) -> list[str]:
        """Returns lines for the log about what all ranks have read; collective over `group`."""
        return said(of_all_ranks((self.counts, self.problems), group), job)

    def restore(self, checkpoint: Path) -> str | None:
        """Goes on where a checkpoint's readers were, and returns a note if their number differs.

        Then no sample is read twice in a pass, but some not at all: readers begin with the parts after those that any
        reader had begun. A checkpoint of other rows, or of a run that did not stream, changes nothing.
        """
        states = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(checkpoint.glob(_FILE))]
        states = [state for state in states if state["digest"] == self._digest]
        if not states:
            return None
        places = {int(reader): _place(place) for state in states for reader, place in state["places"].items()}
        if self._rank == 0:
            self.counts = sum((Counter(state["counts"]) for state in states), Counter())
        self.problems = states[0]["problems"] if self._rank == 0 else []
        was, now = states[0]["readers"], self._stream.num_readers
        if was != now:
            part = 1 + max(place.reached for place in places.values())
            self._stream.places = {reader: self._stream.start(reader, part) for reader in self._own}
            return f"{was} processes have read the stream, and {now} go on with the parts that none has begun"
        if missing := [reader for reader in self._own if reader not in places]:
            raise EnvironmentProblem(
                f"{checkpoint} does not say where reader {missing[0]} of the stream was",
                hint="Copy its files stream-*.json from the other nodes.",
            )
        # a data loader takes from its workers in turn: it goes on with the one that was next
        if states[0]["per_rank"] == self._per_rank:
            self._next = next(state["next"] for state in states if str(self._own[0]) in state["places"])
        order = [self._own[(self._next + index) % self._per_rank] for index in range(self._per_rank)]
        self._stream.places = {reader: places[reader] for reader in order}
        return None


def _place(place: Mapping[str, Any]) -> Place:
    return Place(**{**place, "rows": tuple(RowPlace(*at) for at in place["rows"])})


def said(of_ranks: Sequence[tuple[Counter[str], list[str]]], job: Job) -> list[str]:
    """Returns lines for the log about what all ranks have read, given the counts and problems of each."""
    counts = sum((counts for counts, _ in of_ranks), Counter[str]())
    problems = [problem for _, problems in of_ranks for problem in problems][:_SHOWN_PROBLEMS]
    samples, tokens = counts["samples"], counts["tokens"]
    read = f"{units.counted(samples, 'sample')}, {units.counted(tokens, 'token')}"
    parts = [f"read {read} ({tokens / max(1, samples):.0f} on average)"]
    parts.append(f"{counts['learned']:,} ({counts['learned'] / max(1, tokens):.1%}) with loss")
    if counts["long"]:
        done = "dropped (on_long_sample)" if job.on_long_sample is OnLongSample.DROP else "truncated"
        parts.append(f"{counts['long']:,} longer than seq_len {job.seq_len:,}, which were {done}")
    if counts["untaught"]:
        parts.append(f"{counts['untaught']:,} without a token to learn, which were dropped")
    lines = [", ".join(parts), *counted(counts, job)]
    if counts["skipped"]:
        lines.append(f"{unusable(counts['skipped'])} skipped (on_bad_row: skip); the first:")
    return [f"stream: {line}" for line in lines] + [f"  {problem}" for problem in problems]
