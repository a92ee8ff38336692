"""Samples in tokens: sequences with labels, or pairs, the columns of their files, and what is counted about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import datasets  # type: ignore[import-untyped]

from dstrain import units
from dstrain.choices import LossOn
from dstrain.facts.data.columns import IMAGES, MEDIA, VIDEOS
from dstrain.facts.data.datafile import Refuse
from dstrain.job.schema import Job
from dstrain.train.data.chat import Counts
from dstrain.train.data.sources import Rows
from dstrain.train.data.tokenize import Encoded, Encoder

if TYPE_CHECKING:
    from dstrain.train.data.media import MediaReader

NUMBERS = datasets.List(datasets.Value("int32"))
"""Type of a column with a list of numbers for each sample."""
_FILES = datasets.List(datasets.Value("string"))
MEDIA_TYPES = {IMAGES: _FILES, VIDEOS: datasets.List(_FILES)}
"""Type of each column with a list of files, or of frames, for each sample."""
FIGURES = ("length", "num_learned", "num_cut", "num_images", "num_videos")
"""Columns of a file with a number for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sample in tokens."""

    columns: Mapping[str, Sequence[Any]]
    """Lists of numbers, or lists of such, and of files; empty ones if there is nothing to learn."""
    length: int = 0
    """Tokens; 0 if there is nothing to learn."""
    num_learned: int = 0
    num_cut: int = 0
    num_images: int = 0
    num_videos: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Key of `COUNTED` → number."""
    where: str = ""
    """Its place, such as file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of samples in tokens: sequences, or pairs of them."""

    columns: Mapping[str, Any]
    """Name → type of the columns that the Trainer reads."""
    encoded: Callable[[Encoder, Rows, Refuse], Iterator[TokenRow]]
    """Yields the tokens of every sample; errors of unusable ones go to its last argument."""
    whole: Callable[[Any], Any] = lambda dataset: dataset
    """Returns the data set of the Trainer, given one with these columns."""
    loss_on: LossOn | None = None
    """The answers that count; None: as the job says."""
    media_reader: MediaReader | None = None
    """Reads images and videos; None: samples with any are refused."""

    @property
    def features(self) -> datasets.Features:
        """The columns of a file: those that the Trainer reads, figures of each sample, and a checksum."""
        figures = {name: datasets.Value("int32") for name in FIGURES}
        return datasets.Features({**self.columns, **figures, "crc": datasets.Value("uint32")})


def _sequences(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    for sample in encoder.encode(rows.parsed(refuse), refuse):
        ids, labels = (sample.input_ids, sample.labels) if sample.teaches else ([], [])
        row = TokenRow(
            columns={"input_ids": ids, "labels": labels},
            length=len(ids),
            num_learned=sample.num_learned,
            num_cut=sample.num_cut,
            counts=counts_of(sample.counts),
            where=sample.where,
        )
        yield with_files(row, sample, encoder)


def with_files(row: TokenRow, sample: Encoded | None, encoder: Encoder) -> TokenRow:
    """Returns a row with the files of the images and videos of a sample, if the encoder reads any."""
    if encoder.media_reader is None:
        return row
    files = {name: getattr(sample, name) if sample is not None and row.length else () for name in MEDIA}
    counts: dict[str, Any] = {f"num_{name}": len(files[name]) for name in MEDIA}
    return replace(row, columns={**row.columns, **files}, **counts)


SEQUENCES = Form(columns={"input_ids": NUMBERS, "labels": NUMBERS}, encoded=_sequences)
"""Each sample is a sequence with labels."""


def with_media(form: Form, media_reader: MediaReader) -> Form:
    """Returns a form with the files of the images and videos of samples, for models with a tower."""
    return replace(form, columns={**form.columns, **MEDIA_TYPES}, media_reader=media_reader)


@lru_cache(maxsize=64)
def counts_of(counts: Counts) -> Mapping[str, int]:
    """Returns the counts of a conversation that are not 0, by their keys of `COUNTED`."""
    return MappingProxyType({name: count for name, count in asdict(counts).items() if count})


COUNTED = MappingProxyType(
    {
        "empty_answers": ("answer is", "answers are", "empty: the model learns to say nothing there"),
        "cut_answers": (
            "answer is", "answers are", "cut in the middle by seq_len: the model does not learn to end such answers",
        ),
        "cut_images": (
            "conversation is",
            "conversations are",
            "dropped: seq_len would cut images or videos (max_pixels and video_… limit them)",
        ),
        "lost_thoughts": ("answer is", "answers are", "trained without thoughts (thinking: {job.thinking})"),
        "empty_thoughts": (
            "answer begins",
            "answers begin",
            "with an empty block of thoughts (thinking: off makes it part of the prompt)",
        ),
        "control_texts": (
            "conversation has",
            "conversations have",
            "control tokens of a chat template in their own text: rendered already?",
        ),
        "lost_tools": ("conversation has", "conversations have", "tools that the chat template does not describe"),
        "lost_prompts": ("system prompt is", "system prompts are", "omitted by the chat template"),
        "equal_pairs": ("pair has", "pairs have", "equal answers, of which nothing can be learned"),
        "empty_sides": ("answer of a pair is", "answers of pairs are", "empty"),
    }
)  # fmt: skip
"""Field of `chat.Counts`, or a count of pairs → its text in the log: of one, of several, and what follows."""

_PLACED = frozenset({"empty_answers", "control_texts", "lost_tools", "equal_pairs", "empty_sides"})
"""Counts of samples that their author may want to look at."""
_UNKNOWN: Mapping[str, str] = MappingProxyType({})


def counted(counts: Mapping[str, int], job: Job, firsts: Mapping[str, str] = _UNKNOWN) -> list[str]:
    """Returns a line for each count above 0; `firsts` has the place of the first sample that each counts."""
    lines = []
    for what, (one, several, rest) in COUNTED.items():
        if count := counts.get(what, 0):
            first = f"; the first: {firsts[what]}" if what in _PLACED and firsts.get(what) else ""
            lines.append(f"{units.counted(count, one, several)} {rest.format(job=job)}{first}")
    return lines
