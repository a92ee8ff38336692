"""What a rank trains on: data from a file or a hub, in tokens, cut, counted and packed."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import transformers
from datasets.exceptions import DatasetGenerationError  # type: ignore[import-untyped]

import dstrain
from dstrain.choices import DataFormat
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts.datafile import Sample, format_of, is_file_name, num_rows, samples, to_conversation
from dstrain.facts.samples import unused, unused_text
from dstrain.job import Job
from dstrain.train.hubs import from_hub
from dstrain.train.packing import PackedRows, best_fit
from dstrain.train.tokenize import Encoder

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "length": datasets.Value("int32"),
        "num_cut": datasets.Value("int32"),
        "unused": datasets.Value("string"),
        "crc": datasets.Value("uint32"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Data that a Trainer and a `collate.Collator` can take."""

    dataset: Any
    """`datasets.Dataset` with `input_ids`, `labels` and `length`, or `PackedRows`."""
    num_samples: int
    """Samples that are trained on."""
    num_tokens: int
    """Their tokens, without padding."""
    num_truncated: int
    """Samples that were longer than `seq_len`."""
    num_dropped: int
    """Samples that were left out, because no token is left to learn."""
    notes: tuple[str, ...]
    """What the log says about all this, a line each."""
    digest: str
    """Changes when a token, a label, or the order in which samples are trained on changes."""

    @property
    def columns(self) -> Any:
        """The data set as a `collate.Collator` reads it fastest: its columns are NumPy arrays."""
        return self.dataset if isinstance(self.dataset, PackedRows) else self.dataset.with_format("numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Rows that can be gone through, and what tells them from other rows."""

    name: str
    """File or data set id, for messages."""
    identity: str
    """Changes when the rows change."""
    rows: Callable[[], Iterator[Sample]]
    """Yields all rows in order."""
    count: Callable[[], int]
    """Returns how many there are, about; 0 where nobody knows."""


Report = Callable[[int, int], None]
"""Takes what is done and all there is, 0 where nobody knows."""


def prepare(
    job: Job, tokenizer: Any, *, data: str, training: bool, report: Report = lambda done, total: None
) -> Prepared:
    """Returns the data of a job in tokens: samples in their order, or rows of `seq_len` when the job packs.

    Ranks call it alike: the first one on a node tokenizes into the cache of `datasets`, the others wait and read the
    same file; `report` hears of its progress. Raises InvalidConfig with file and line for a row that cannot be used.
    """
    source = _source(job, data, training=training)
    encoder = Encoder(tokenizer=tokenizer, seq_len=job.seq_len, loss_on=job.loss_on)
    encoded = _tokenized(source, encoder, job.data_format, report)
    columns = encoded.with_format("numpy")
    lengths = columns["length"][:]
    truncated = int((columns["num_cut"][:] > 0).sum())
    kept = lengths.nonzero()[0]
    dropped = len(lengths) - len(kept)
    if not len(kept):
        raise InvalidConfig(
            f"{source.name}: none of {len(lengths):,} samples has a token of an answer in its first {job.seq_len:,}",
            hint="Raise seq_len, or set loss_on: all.",
        )
    dataset: Any = (encoded.select(kept) if dropped else encoded).select_columns(["input_ids", "labels", "length"])
    lengths = [int(length) for length in lengths[kept]]
    notes = _notes(source.name, lengths, seq_len=job.seq_len, truncated=truncated, dropped=dropped)
    notes += [f"{source.name}: {unused_text(counts)}"] if (counts := _unused(encoded)) else []
    if job.packing:
        rows = best_fit(lengths, job.seq_len, seed=job.seed)
        dataset = PackedRows(samples=dataset.with_format("arrow"), rows=rows)
        filled = sum(lengths) / (len(rows) * job.seq_len)
        notes.append(f"{source.name}: packed into {len(rows):,} rows of {job.seq_len:,} tokens, {filled:.1%} filled")
    return Prepared(
        dataset=dataset,
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        num_truncated=truncated,
        num_dropped=dropped,
        notes=tuple(notes),
        digest=_digest(columns["crc"][:], job),
    )


def _digest(crcs: Any, job: Job) -> str:
    """Returns the digest of samples, given their checksums (uint32, one each), and of what decides on their order."""
    order = f"{job.seed} {job.packing} {job.seq_len}".encode()
    return hashlib.sha256(crcs.tobytes() + order).hexdigest()[:16]


def _notes(name: str, lengths: list[int], *, seq_len: int, truncated: int, dropped: int) -> list[str]:
    tokens = sum(lengths)
    mean = tokens / len(lengths)
    notes = [f"{name}: {len(lengths):,} samples, {tokens:,} tokens ({mean:.0f} on average, {max(lengths):,} at most)"]
    if truncated:
        share = truncated / (len(lengths) + dropped)
        notes.append(f"{name}: {truncated:,} samples ({share:.1%}) are longer than seq_len {seq_len:,} and were cut")
    if dropped:
        notes.append(f"{name}: {dropped:,} samples have no token left to learn and were left out")
    return notes


def _unused(encoded: datasets.Dataset) -> Counter[str]:
    """Returns what nobody read of the rows: name → samples that hold it."""
    counts: Counter[str] = Counter()
    for group in encoded.data.column("unused").value_counts().to_pylist():
        counts.update(dict.fromkeys(json.loads(group["values"]), group["counts"]))
    return counts


def _source(job: Job, data: str, *, training: bool) -> _Source:
    if is_file_name(data):
        path = Path(data).expanduser()
        stamp = path.stat() if path.exists() else None
        identity = f"{path.resolve()} {stamp.st_size} {stamp.st_mtime_ns}" if stamp else str(path)
        return _Source(name=str(path), identity=identity, rows=lambda: samples(path), count=lambda: num_rows(path))
    name, dataset = from_hub(data, job.hub, training=training)

    def numbered() -> Iterator[Sample]:
        return (Sample(where=f"{name}: row {number}", row=row) for number, row in enumerate(dataset, start=1))

    return _Source(name=name, identity=str(dataset._fingerprint), rows=numbered, count=lambda: len(dataset))


def _tokenized(source: _Source, encoder: Encoder, data_format: DataFormat, report: Report) -> datasets.Dataset:
    """Returns every sample in tokens, from the cache where it is there; a sample with nothing to learn has none."""

    def generate() -> Iterator[dict[str, Any]]:
        rows = source.rows()
        first, total = next(rows), source.count()
        known = format_of(source.name, list(first.row), data_format)
        ignored: deque[str] = deque()  # of the samples that the encoder has taken and not given back yet

        def conversation(sample: Sample) -> tuple[str, Any]:
            talk = to_conversation(sample, known)
            ignored.append(json.dumps(unused(sample.row, known)))
            return sample.where, talk

        for done, sample in enumerate(encoder.encode(map(conversation, chain([first], rows)))):
            report(done, total)
            ids, labels = (sample.input_ids, sample.labels) if sample.teaches else ([], [])
            row = {"input_ids": ids, "labels": labels, "length": len(ids), "num_cut": sample.num_cut}
            yield {**row, "crc": zlib.crc32(array("i", [*ids, *labels])), "unused": ignored.popleft()}

    try:
        with _quiet_where_no_terminal():
            found = datasets.Dataset.from_generator(
                generate, features=_FEATURES, fingerprint=_fingerprint(source, encoder, data_format)
            )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DstrainError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, OSError):
            raise EnvironmentProblem(
                f"the tokens of {source.name} cannot be written to {datasets.config.HF_DATASETS_CACHE}: "
                f"{error.__cause__.strerror or error.__cause__}",
                hint="Free some space, or set HF_DATASETS_CACHE to another folder.",
            ) from error
        raise
    return found


def _fingerprint(source: _Source, encoder: Encoder, data_format: DataFormat) -> str:
    """Returns a name for the tokens that is the same on every rank, and another when anything that makes them is."""
    tokenizer = encoder.tokenizer
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = {key: value for key, value in state.items() if key not in {"padding", "truncation"}}
    else:
        vocabulary = tokenizer.get_vocab()
    made_from = [
        *(dstrain.__version__, transformers.__version__, source.identity, data_format.value, list(_FEATURES)),
        *(encoder.seq_len, encoder.loss_on.value, type(tokenizer).__name__, tokenizer.chat_template),
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
