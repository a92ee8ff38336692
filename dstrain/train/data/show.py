"""Shows samples as the model sees them, with counts: `python -m dstrain.train.data.show`, for `dstrain data show`.

It reads a `ShowQuestion` as JSON and writes a `ShowAnswer`. Samples are read and tokenized by the code of training; the
model itself is not loaded.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, islice
from typing import Any

from dstrain import units
from dstrain.choices import DataFormat, LossOn, OnBadRow, Task
from dstrain.errors import DstrainError, InvalidConfig
from dstrain.facts.data.columns import unusable, unused_text
from dstrain.facts.data.datafile import Refuse
from dstrain.facts.data.formats import SIDES
from dstrain.facts.data.messages import Piece, ShowAnswer, ShownData, ShownSample, ShowQuestion
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job
from dstrain.records import from_data, to_data
from dstrain.train.data.media import load_media_reader
from dstrain.train.data.pairs import encoded_pairs
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.sources import Rows, rows_of
from dstrain.train.data.tokenize import Encoded, Encoder, counted, counts_of
from dstrain.train.tokenizer import load_tokenizer, source_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A sample in tokens, or the two sides of a pair."""

    sides: tuple[Encoded, ...]
    counts: Mapping[str, int]
    teaches: bool


@dataclass
class _Tally:
    """The counts of the samples read so far."""

    chosen: _Read | None = None
    num_samples: int = 0
    num_untaught: int = 0
    num_long: int = 0
    num_tokens: int = 0
    max_tokens: int = 0
    num_learned: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)

    def add(self, read: _Read) -> None:
        self.num_samples += 1
        self.num_long += any(side.num_cut > 0 for side in read.sides)
        self.counts.update(read.counts)
        self.firsts = dict.fromkeys(read.counts, read.sides[0].where) | self.firsts
        if not read.teaches:
            self.num_untaught += 1
            return
        lengths = [len(side.input_ids) for side in read.sides]
        self.num_tokens += sum(lengths)
        self.max_tokens = max(self.max_tokens, *lengths)
        self.num_learned += sum(side.num_learned for side in read.sides)


def shown(job: Job, source: DataSource, encoder: Encoder, *, sample: int, limit: int | None) -> ShownData:
    """Returns a sample of a data set, and the counts of its first `limit` samples.

    Raises InvalidConfig for an unusable row, or if the data set has no sample of that number.
    """
    rows = rows_of(source, job, training=True)
    skipped: list[str] = []

    def refuse(error: InvalidConfig) -> None:
        if job.on_bad_row is OnBadRow.STOP:
            raise error
        skipped.append(str(error.problem))

    samples, tally = _samples(rows, encoder, refuse), _Tally()
    # the sample may be behind those that are counted
    for number, read in enumerate(islice(samples, None if limit is None else max(limit, sample)), start=1):
        tally.add(read)
        tally.chosen = read if number == sample else tally.chosen
    if tally.chosen is None:
        problem = f"{rows.name} has {units.counted(tally.num_samples, 'usable sample')}, none of number {sample:,}"
        first = [f"{unusable(len(skipped))} skipped; the first: {skipped[0]}"] if skipped else []
        raise InvalidConfig("\n".join([problem, *first]))
    names = SIDES if len(tally.chosen.sides) > 1 else ("",)
    notes = [*counted(tally.counts, job, tally.firsts), *([unused_text(rows.unused)] if rows.unused else [])]
    notes += [f"{unusable(len(skipped))} skipped; the first: {skipped[0]}"] if skipped else []
    return ShownData(
        name=rows.name,
        samples=tuple(_sample(encoder, sample, *side) for side in zip(names, tally.chosen.sides, strict=True)),
        is_complete=next(samples, None) is None,
        notes=tuple(notes),
        **{one.name: getattr(tally, one.name) for one in fields(tally) if one.name not in {"chosen", "firsts"}},
    )


def _samples(rows: Rows, encoder: Encoder, refuse: Refuse) -> Iterator[_Read]:
    """Yields the samples that training reads, in order."""
    if rows.reading.format is DataFormat.PREFERENCE:
        for pair in encoded_pairs(encoder, rows, refuse):
            yield _Read(sides=pair.sides, counts=pair.counts, teaches=pair.teaches)
    else:
        for encoded in encoder.encode(rows.parsed(refuse), refuse):
            yield _Read(sides=(encoded,), counts=counts_of(encoded.counts), teaches=encoded.teaches)


def _sample(encoder: Encoder, number: int, side: str, encoded: Encoded) -> ShownSample:
    names: list[str] = []
    if encoder.media_reader is not None:
        names = encoder.media_reader.names(encoded.images, encoded.videos)
    return ShownSample(
        number=number,
        place=", ".join(filter(None, [encoded.where, side])),
        pieces=tuple(pieces(encoder.tokenizer, encoded.input_ids, encoded.labels, names, encoded.media_of)),
        num_tokens=len(encoded.input_ids),
        num_learned=encoded.num_learned,
        num_cut=encoded.num_cut,
    )


def pieces(
    tokenizer: Any,
    input_ids: Sequence[int],
    labels: Sequence[int],
    names: Sequence[str] = (),
    media_of: Sequence[int | None] = (),
) -> Iterator[Piece]:
    """Yields the text of consecutive tokens that are all learned or all not; special tokens are pieces of their own.

    So are the tokens of an image or a video, as its name of `names` and their number; `media_of` has the
    index of it for each token, None of text.

    The first token is never predicted, so it has no loss, whatever its label.

    A piece is what it adds to the text before it: alone, a first token would lose its space in some tokenizers.
    """
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    media_of = media_of or [None] * len(input_ids)
    kinds = [
        (
            label != IGNORED and index > 0,
            image is None and token in special,
            image,
            index if image is None and token in special else -1,
        )
        for index, (token, label, image) in enumerate(zip(input_ids, labels, media_of, strict=True))
    ]
    # the number keeps two special tokens in a row apart, which groupby would join
    end, before = 0, ""
    for (is_learned, is_special, image, _), group in groupby(kinds):
        num_tokens = len(list(group))
        end += num_tokens
        text = tokenizer.decode(input_ids[:end], clean_up_tokenization_spaces=False)
        added_text = text[len(before) :] if image is None else f"[{names[image]}, {units.counted(num_tokens, 'token')}]"
        yield Piece(text=added_text, is_learned=is_learned, is_special=is_special or image is not None)
        before = text


def main() -> int:
    """Answers the question on standard input; returns the exit code. Errors go to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    question = from_data(ShowQuestion, json.load(sys.stdin), locate=lambda place: "/".join(map(str, place)))
    job = question.job
    try:
        tokenizer = load_tokenizer(job, source_of(job))
        loss_on = LossOn.LAST if job.task is Task.DPO else job.loss_on
        media_reader = load_media_reader(job, source_of(job), tokenizer)
        encoder = Encoder(
            tokenizer=tokenizer, seq_len=job.seq_len, loss_on=loss_on, thinking=job.thinking, media_reader=media_reader
        )
        data = [
            shown(job, source, encoder, sample=question.sample, limit=question.limit) for source in job.train_sources
        ]
    except DstrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    json.dump(to_data(ShowAnswer(data=tuple(data))), out)
    out.flush()  # Python flushes sys.stdout at its end, which is another stream now
    return 0


if __name__ == "__main__":
    sys.exit(main())
