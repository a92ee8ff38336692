"""Prepares a rank's data: read from a file or a hub, tokenized, truncated, counted and packed."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets  # type: ignore[import-untyped]
import transformers
from datasets.exceptions import DatasetGenerationError  # type: ignore[import-untyped]

import dstrain
from dstrain.choices import DataFormat, OnBadRow
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts.data.datafile import Refuse, Sample, format_of, is_file_name, num_rows, samples, to_conversation
from dstrain.facts.data.sample_formats import unused, unused_text
from dstrain.job.schema import Job
from dstrain.train.data.hub_datasets import from_hub
from dstrain.train.data.packing import PackedRows, best_fit
from dstrain.train.data.tokenize import Encoder

_SHOWN_PROBLEMS = 5
_COUNTED = MappingProxyType(
    {
        "empty_answers": "answers are empty: the model learns to say nothing there",
        "lost_thoughts": "answers are trained without their thoughts (thinking: {job.thinking})",
        "empty_thoughts": "answers begin with an empty block of thoughts (thinking: off makes it part of the prompt)",
        "lost_prompts": "system prompts are omitted by the chat template",
    }
)
"""Field of `chat.Counts` → its text in the log."""

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "length": datasets.Value("int32"),
        "num_cut": datasets.Value("int32"),
        "said": datasets.Value("string"),
        "crc": datasets.Value("uint32"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Tokenized data for the Trainer and `collate.Collator`."""

    dataset: Any
    """`datasets.Dataset` with `input_ids`, `labels` and `length`, or `PackedRows`."""
    num_samples: int
    """Samples, without dropped ones."""
    num_tokens: int
    """Tokens, without padding."""
    num_truncated: int
    """Samples longer than `seq_len`."""
    num_dropped: int
    """Samples without a token to learn."""
    notes: tuple[str, ...]
    """Lines for the log."""
    digest: str
    """Changes with any token, any label, and the order of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The rows of a file or of a data set on a hub."""

    name: str
    """File or data set id, for messages."""
    identity: str
    """Changes with the rows."""
    rows: Callable[[Refuse], Iterator[Sample]]
    """Yields all rows in order; errors of unreadable ones go to its argument."""
    count: Callable[[], int]
    """Returns their approximate number; 0 if unknown."""


Report = Callable[[int, int], None]
"""Called with the number of finished samples and the total, 0 if unknown."""


def prepare(
    job: Job, tokenizer: Any, *, data: str, training: bool, report: Report = lambda done, total: None
) -> PreparedData:
    """Returns the tokenized data of a job: samples in order, or with packing rows of `seq_len` tokens.

    All ranks call it: the first one on a node tokenizes into the cache of `datasets` and calls `report`, the others
    wait and read the same file. Raises InvalidConfig with file and line for an unusable row.
    """
    source = _source(job, data, training=training)
    encoder = Encoder(tokenizer=tokenizer, seq_len=job.seq_len, loss_on=job.loss_on, thinking=job.thinking)
    encoded = _tokenized(source, encoder, job, report)
    columns = encoded.with_format("numpy")
    lengths = columns["length"][:]
    truncated = int((columns["num_cut"][:] > 0).sum())
    kept = lengths.nonzero()[0]
    dropped = len(lengths) - 1 - len(kept)
    remarks = _remarks(source.name, json.loads(encoded[-1]["said"]), job)
    if not len(kept):
        problem = f"none of {len(lengths) - 1:,} samples has a token of an answer among its first {job.seq_len:,}"
        raise InvalidConfig("\n".join([f"{source.name}: {problem}", *remarks]), hint="Raise seq_len.")
    dataset: Any = encoded.select(kept).select_columns(["input_ids", "labels", "length"])
    lengths = [int(length) for length in lengths[kept]]
    notes = _notes(source.name, lengths, seq_len=job.seq_len, truncated=truncated, dropped=dropped)
    notes += remarks
    if job.packing:
        rows = best_fit(lengths, job.seq_len, seed=job.seed)
        dataset = PackedRows(samples=dataset.with_format("arrow"), rows=rows)
        filled = sum(lengths) / (len(rows) * job.seq_len)
        notes.append(f"{source.name}: packed into {len(rows):,} rows of {job.seq_len:,} tokens, {filled:.1%} filled")
    return PreparedData(
        dataset=dataset,
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        num_truncated=truncated,
        num_dropped=dropped,
        notes=tuple(notes),
        digest=_digest(columns["crc"][:], job),
    )


def _digest(crcs: Any, job: Job) -> str:
    """Returns the digest of the samples' checksums, (samples,) uint32, and of the settings that decide their order."""
    order = f"{job.seed} {job.packing} {job.seq_len}".encode()
    return hashlib.sha256(crcs.tobytes() + order).hexdigest()[:16]


def _notes(name: str, lengths: list[int], *, seq_len: int, truncated: int, dropped: int) -> list[str]:
    tokens = sum(lengths)
    mean = tokens / len(lengths)
    notes = [f"{name}: {len(lengths):,} samples, {tokens:,} tokens ({mean:.0f} on average, {max(lengths):,} at most)"]
    if truncated:
        share = truncated / (len(lengths) + dropped)
        notes.append(
            f"{name}: {truncated:,} samples ({share:.1%}) are longer than seq_len {seq_len:,} and were truncated"
        )
    if dropped:
        notes.append(f"{name}: {dropped:,} samples have no token to learn and were dropped")
    return notes


def _remarks(name: str, said: dict[str, Any], job: Job) -> list[str]:
    """Returns lines for the log about unused columns, answers, and skipped rows."""
    notes = [unused_text(Counter(said["unused"]))] if said["unused"] else []
    notes += [f"{count:,} {_COUNTED[what].format(job=job)}" for what, count in said["counts"].items() if count]
    if said["skipped"]:
        notes.append(f"{said['num_skipped']:,} unusable rows were skipped (on_bad_row: skip); the first:")
    return [f"{name}: {note}" for note in notes] + [f"  {problem}" for problem in said["skipped"]]


def _source(job: Job, data: str, *, training: bool) -> _Source:
    if is_file_name(data):
        path = Path(data).expanduser()
        stamp = path.stat() if path.exists() else None
        identity = f"{path.resolve()} {stamp.st_size} {stamp.st_mtime_ns}" if stamp else str(path)
        return _Source(
            name=str(path), identity=identity, rows=lambda refuse: samples(path, refuse), count=lambda: num_rows(path)
        )
    name, dataset = from_hub(data, job.hub, training=training)

    def numbered(_: Refuse) -> Iterator[Sample]:
        return (Sample(where=f"{name}: row {number}", row=row) for number, row in enumerate(dataset, start=1))

    return _Source(name=name, identity=str(dataset._fingerprint), rows=numbered, count=lambda: len(dataset))


def _tokenized(source: _Source, encoder: Encoder, job: Job, report: Report) -> datasets.Dataset:
    """Returns the tokens of every sample, possibly from the cache; a sample without a token to learn has none.

    An additional last row holds the counts for the log.
    """

    def generate() -> Iterator[dict[str, Any]]:
        counts: Counter[str] = Counter()
        columns: Counter[str] = Counter()
        skipped: list[str] = []

        def refuse(error: InvalidConfig) -> None:
            if job.on_bad_row is OnBadRow.STOP:
                raise error
            skipped.append(str(error.problem))

        conversations, total = _conversations(source, job.data_format, refuse, columns), 0
        for done, sample in enumerate(encoder.encode(conversations, refuse)):
            total = total if done else source.count()
            report(done, total)
            counts.update({name: getattr(sample.counts, name) for name in _COUNTED})
            yield _row(*((sample.input_ids, sample.labels) if sample.teaches else ([], [])), num_cut=sample.num_cut)
        said = {"unused": columns, "counts": counts, "skipped": skipped[:_SHOWN_PROBLEMS], "num_skipped": len(skipped)}
        yield _row([], [], num_cut=0, said=json.dumps(said))

    try:
        with _quiet_where_no_terminal():
            encoded = datasets.Dataset.from_generator(
                generate, features=_FEATURES, fingerprint=_fingerprint(source, encoder, job)
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
    return encoded


def _row(ids: list[int], labels: list[int], *, num_cut: int, said: str = "") -> dict[str, Any]:
    row = {"input_ids": ids, "labels": labels, "length": len(ids), "num_cut": num_cut}
    return {**row, "crc": zlib.crc32(array("i", [*ids, *labels])), "said": said}


def _conversations(
    source: _Source, data_format: DataFormat, refuse: Refuse, columns: Counter[str]
) -> Iterator[tuple[str, list[dict[str, str]] | str]]:
    """Yields the place of each row, and its conversation or text; counts unused columns in `columns`."""
    detected = None
    for sample in source.rows(refuse):
        detected = detected or format_of(source.name, list(sample.row), data_format)
        try:
            conversation = to_conversation(sample, detected)
        except InvalidConfig as error:
            refuse(error)
            continue
        columns.update(unused(sample.row, detected))
        yield sample.where, conversation


def _fingerprint(source: _Source, encoder: Encoder, job: Job) -> str:
    """Returns the key of the tokens in the cache: equal on all ranks, and different for any other input."""
    tokenizer = encoder.tokenizer
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = {key: value for key, value in state.items() if key not in {"padding", "truncation"}}
    else:
        vocabulary = tokenizer.get_vocab()
    made_from = [
        *(dstrain.__version__, transformers.__version__, source.identity, job.data_format.value, list(_FEATURES)),
        *(encoder.seq_len, encoder.loss_on.value, encoder.thinking.value, job.on_bad_row.value),
        *(type(tokenizer).__name__, tokenizer.chat_template),
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
