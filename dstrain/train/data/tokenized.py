"""Tokenizes one data set into the cache of `datasets`, once for all ranks of a node."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import datasets  # type: ignore[import-untyped]
import transformers
from datasets.exceptions import DatasetGenerationError  # type: ignore[import-untyped]

import dstrain
from dstrain.choices import LossOn, OnBadRow
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts.data.datafile import Refuse
from dstrain.job.schema import Job
from dstrain.train.data.chat import Counts
from dstrain.train.data.sources import Rows
from dstrain.train.data.tokenize import Encoded, Encoder

if TYPE_CHECKING:
    from dstrain.train.data.images import Images

_SHOWN_PROBLEMS = 5

PATHS = "images"
"""Column with the paths of images."""
NUMBERS = datasets.List(datasets.Value("int32"))
"""Type of a column with a list of numbers for each sample."""
_COMMON = {
    "length": datasets.Value("int32"),
    "num_learned": datasets.Value("int32"),
    "num_cut": datasets.Value("int32"),
    "num_images": datasets.Value("int32"),
    "said": datasets.Value("string"),
    "crc": datasets.Value("uint32"),
}

Report = Callable[[int, int], None]
"""Called with the number of finished samples and the total, 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the log says about the rows of a data set."""

    unused: dict[str, int]
    """Unused column → number of samples with it."""
    counts: dict[str, int]
    """Field of `chat.Counts` → its sum."""
    skipped: list[str]
    """The first problems of skipped rows."""
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sample in tokens."""

    columns: Mapping[str, Sequence[Any]]
    """Lists of numbers, or lists of such, and of paths; empty ones if there is nothing to learn."""
    length: int = 0
    """Tokens; 0 if there is nothing to learn."""
    num_learned: int = 0
    num_cut: int = 0
    num_images: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Key of `COUNTED` → number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What samples are in tokens: sequences, or pairs of them."""

    columns: Mapping[str, Any]
    """Name → type of the columns that the Trainer reads."""
    encoded: Callable[[Encoder, Rows, Refuse], Iterator[TokenRow]]
    """Yields the tokens of every sample; errors of unusable ones go to its last argument."""
    whole: Callable[[Any], Any] = lambda dataset: dataset
    """Returns the data set of the Trainer, given one with these columns."""
    loss_on: LossOn | None = None
    """The answers that count; None: those of the job."""
    images: Images | None = None
    """Reads images; None: samples with images are refused."""


def _sequences(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    return map(_sequence, encoder.encode(rows.conversations(refuse), refuse))


def _sequence(sample: Encoded) -> TokenRow:
    ids, labels = (sample.input_ids, sample.labels) if sample.teaches else ([], [])
    return TokenRow(
        columns={"input_ids": ids, "labels": labels},
        length=len(ids),
        num_learned=sample.num_learned,
        num_cut=sample.num_cut,
        counts=counts_of(sample.counts),
    )


def _with_images(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    for sample in encoder.encode(rows.conversations(refuse), refuse):
        row, paths = _sequence(sample), sample.images if sample.teaches else ()
        yield replace(row, columns={**row.columns, PATHS: paths}, num_images=len(paths))


SEQUENCES = Form(columns={"input_ids": NUMBERS, "labels": NUMBERS}, encoded=_sequences)
"""Each sample is a sequence with labels."""


def sequences_with_images(images: Images) -> Form:
    """Returns the form of sequences with the paths of their images, for models with a vision tower."""
    columns = {**SEQUENCES.columns, PATHS: datasets.List(datasets.Value("string"))}
    return Form(columns=columns, encoded=_with_images, images=images)


def tokenized(rows: Rows, encoder: Encoder, job: Job, report: Report, form: Form) -> tuple[datasets.Dataset, Said]:
    """Returns the tokens of every sample, possibly from the cache; a sample without a token to learn has none.

    Raises InvalidConfig with file and line for an unusable row.
    """

    def generate() -> Iterator[dict[str, Any]]:
        counts: Counter[str] = Counter()
        skipped: list[str] = []

        def refuse(error: InvalidConfig) -> None:
            if job.on_bad_row is OnBadRow.STOP:
                raise error
            skipped.append(str(error.problem))

        total = 0
        for done, sample in enumerate(form.encoded(encoder, rows, refuse)):
            total = total if done else rows.count()
            report(done, total)
            counts.update(sample.counts)
            yield _row(sample)
        said = {"unused": rows.unused, "counts": counts, "skipped": skipped[:_SHOWN_PROBLEMS]}
        nothing = TokenRow(columns={name: [] for name in form.columns})
        yield _row(nothing, said=json.dumps(said | {"num_skipped": len(skipped)}))

    features = datasets.Features({**form.columns, **_COMMON})
    try:
        with _quiet_where_no_terminal():
            encoded = datasets.Dataset.from_generator(
                generate, features=features, fingerprint=_fingerprint(rows, encoder, job, features)
            )
    except DatasetGenerationError as error:
        raise _explained(error, rows.name) from error.__cause__
    last = len(encoded) - 1  # an additional row holds what the log says
    return encoded.select(range(last)), Said(**json.loads(encoded[last]["said"]))


def _explained(error: Exception, name: str) -> Exception:
    """Returns the error of a row, one that says where tokens cannot be written, or the error itself."""
    cause = error.__cause__
    if isinstance(cause, DstrainError):
        return cause.with_traceback(None)
    if isinstance(cause, OSError):
        folder = datasets.config.HF_DATASETS_CACHE
        return EnvironmentProblem(
            f"the tokens of {name} cannot be written to {folder}: {cause.strerror or cause}",
            hint="Free some space, or set HF_DATASETS_CACHE to another folder.",
        )
    return error


def counts_of(counts: Counts) -> dict[str, int]:
    """Returns the counts of a conversation by their keys of `COUNTED`."""
    return {field.name: getattr(counts, field.name) for field in fields(Counts)}


def _row(sample: TokenRow, said: str = "") -> dict[str, Any]:
    crc = 0
    for name, column in sample.columns.items():
        if name == PATHS:
            crc = zlib.crc32("\n".join(column).encode(), crc)
            continue
        for numbers in column if column and isinstance(column[0], list) else (column,):
            crc = zlib.crc32(array("i", numbers), crc)
    figures = {"length": sample.length, "num_learned": sample.num_learned, "num_cut": sample.num_cut, "crc": crc}
    return {**sample.columns, **figures, "num_images": sample.num_images, "said": said}


def _fingerprint(rows: Rows, encoder: Encoder, job: Job, features: Iterable[str]) -> str:
    """Returns the key of the tokens in the cache: equal on all ranks, and different for any other input."""
    tokenizer, reading = encoder.tokenizer, rows.reading
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = {key: value for key, value in state.items() if key not in {"padding", "truncation"}}
    else:
        vocabulary = tokenizer.get_vocab()
    made_from = [
        *(dstrain.__version__, transformers.__version__, rows.identity, rows.max_samples, list(features)),
        *(reading.format.value, dict(reading.columns), reading.system),
        *(encoder.seq_len, encoder.loss_on.value, encoder.thinking.value, job.on_bad_row.value),
        *(type(tokenizer).__name__, tokenizer.chat_template, encoder.images and encoder.images.identity),
        *(tokenizer.special_tokens_map, vocabulary),
    ]
    return hashlib.sha256(json.dumps(made_from, default=str, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _quiet_where_no_terminal() -> Iterator[None]:
    """Keeps the progress bars of `datasets` out of log files."""
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
