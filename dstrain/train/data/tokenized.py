"""Tokenizes one data set into files that every rank maps into memory, and that the next run finds.

Files are made part by part, over all cores, by all ranks and by `dstrain data prepare` alike: `shared_work`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import datasets  # type: ignore[import-untyped]
import transformers

import dstrain
from dstrain.choices import DataFormat, LossOn, OnBadRow
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data.datafile import Refuse
from dstrain.facts.data.rows import Part
from dstrain.job.schema import Job
from dstrain.paths import write_atomic
from dstrain.train.data.chat import Counts
from dstrain.train.data.shared_work import Tick, Work, locked, make_all
from dstrain.train.data.sources import Rows
from dstrain.train.data.token_files import MEDIA, MEDIA_TYPES, NUMBERS, TokenFile, TokenRow, features_of, read, said_in
from dstrain.train.data.tokenize import Encoded, Encoder

if TYPE_CHECKING:
    from dstrain.train.data.media import MediaReader

_SHOWN_PROBLEMS = 5
_TICK_SAMPLES = 64
_PARTS = "parts.json"
_UNKNOWN = 2**62
"""More rows than any limit."""

Report = Callable[[str, int, int], None]
"""Called with the name of a data set, the number of its finished samples, and their total, 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the log says about the rows of a data set."""

    unused: dict[str, int]
    """Unused column → number of samples with it."""
    counts: dict[str, int]
    """Field of `chat.Counts` → its sum."""
    firsts: dict[str, str]
    """Field of `chat.Counts` → the place of the first sample that it counts."""
    skipped: list[str]
    """The first problems of skipped rows."""
    num_skipped: int
    num_made: int
    """Files that were missing."""
    folder: Path
    """Where the tokens are."""


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
    media_reader: MediaReader | None = None
    """Reads images and videos; None: samples with any are refused."""


def _sequences(encoder: Encoder, rows: Rows, refuse: Refuse) -> Iterator[TokenRow]:
    for sample in encoder.encode(rows.conversations(refuse), refuse):
        yield with_files(_sequence(sample), sample, encoder)


def _sequence(sample: Encoded) -> TokenRow:
    ids, labels = (sample.input_ids, sample.labels) if sample.teaches else ([], [])
    return TokenRow(
        columns={"input_ids": ids, "labels": labels},
        length=len(ids),
        num_learned=sample.num_learned,
        num_cut=sample.num_cut,
        counts=counts_of(sample.counts),
        where=sample.where,
    )


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


def tokenized(rows: Rows, encoder: Encoder, job: Job, report: Report, form: Form) -> tuple[datasets.Dataset, Said]:
    """Returns the tokens of every sample, possibly from the cache; a sample without a token to learn has none.

    Raises InvalidConfig with file and line for an unusable row.
    """
    features = features_of(form.columns)
    key = fingerprint(rows, encoder, job, features)
    folder = cache_folder() / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        maker = _Maker(rows=rows, encoder=encoder, job=job, report=report, form=form, folder=folder, features=features)
        names, num_made = maker.files()
        said = [said_in(folder / name) for name in names]
    except OSError as error:
        raise EnvironmentProblem(
            f"the tokens of {rows.name} cannot be written to {folder}: {error.strerror or error}",
            hint="Free some space, or set HF_DATASETS_CACHE to another folder.",
        ) from error
    maker.require_samples(said)
    dataset = read([folder / name for name in names], features, f"{key}-{rows.max_samples}")
    return dataset, _said(said, num_made, folder)


def cache_folder() -> Path:
    """Returns the folder of all tokens: that of `datasets`, which HF_HOME or HF_DATASETS_CACHE move."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "dstrain"


def _said(parts: Iterable[Mapping[str, Any]], num_made: int, folder: Path) -> Said:
    """Returns what the log says about the rows of all parts."""
    sums: dict[str, Counter[str]] = {"unused": Counter(), "counts": Counter()}
    firsts: dict[str, str] = {}
    skipped: list[str] = []
    num_skipped = 0
    for part in parts:
        for name, counter in sums.items():
            counter.update(part[name])
        firsts = part["firsts"] | firsts
        skipped += part["skipped"][: _SHOWN_PROBLEMS - len(skipped)]
        num_skipped += part["num_skipped"]
    return Said(**sums, firsts=firsts, skipped=skipped, num_skipped=num_skipped, num_made=num_made, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Makes the files of a data set."""

    rows: Rows
    encoder: Encoder
    job: Job
    report: Report
    form: Form
    folder: Path
    features: datasets.Features

    def files(self) -> tuple[list[str], int]:
        """Returns the names of all files in order, after making the missing ones, and the number of these.

        With `max_samples` the parts that surely have no more are made together, and those after them one by one, since
        unusable rows do not count.
        """
        rows, parts = self._parts()
        limit = self.rows.max_samples
        ends = accumulate(part.num_rows or _UNKNOWN for _, part in parts)
        whole = len(parts) if limit is None else sum(end <= limit for end in ends)
        names = [_name(number) for number in range(whole)]
        num_made = self._make(rows, parts[:whole], names, None)
        if limit is None:
            return names, num_made
        for number in range(whole, len(parts)):
            remaining = limit - sum(said_in(self.folder / name)["tally"].get("usable", 0) for name in names)
            if remaining <= 0:
                break
            at_most = None if 0 < parts[number][1].num_rows <= remaining else remaining
            names.append(_name(number, at_most))
            num_made += self._make(rows, [parts[number]], names[-1:], at_most)
        return names, num_made

    def _parts(self) -> tuple[Rows, list[tuple[int, Part]]]:
        """Returns the rows with their format, and all parts with the index of their origin; worked out once."""
        path, names = self.folder / _PARTS, [one.name for one in fields(Part)]
        if not path.exists():
            with locked(self.folder, _PARTS, waits=True):
                if not path.exists():
                    rows = self.rows.detected()
                    parts = [(index, part) for index, origin in enumerate(rows.origins) for part in origin.parts()]
                    listed = [[index, *(getattr(part, name) for name in names)] for index, part in parts]
                    write_atomic(path, json.dumps({"format": rows.reading.format.value, "parts": listed}))
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = replace(self.rows, reading=replace(self.rows.reading, format=DataFormat(data["format"])))
        return rows, [(index, Part(**dict(zip(names, part, strict=True)))) for index, *part in data["parts"]]

    def _make(self, rows: Rows, parts: list[tuple[int, Part]], names: list[str], limit: int | None) -> int:
        """Makes the files of parts, with at most `limit` samples each, and returns how many were missing."""
        sizes = [min(part.num_rows, limit or part.num_rows) for _, part in parts]
        total = sum(sizes) if all(sizes) else 0

        def make(index: int, path: Path, tick: Tick) -> None:
            origin, part = parts[index]
            self._write(rows.of(origin, part, limit), path, tick)

        work = Work(folder=self.folder, names=names, sizes=sizes, make=make)
        name = self.rows.name
        return make_all(work, processes=_processes(), report=lambda done: self.report(name, done, total))

    def _write(self, rows: Rows, path: Path, tick: Tick) -> None:
        """Writes the tokens of the rows of a part."""
        counts: Counter[str] = Counter()
        firsts: dict[str, str] = {}
        skipped: list[str] = []
        file = TokenFile(self.features)

        def refuse(error: InvalidConfig) -> None:
            if self.job.on_bad_row is OnBadRow.STOP:
                raise error
            skipped.append(str(error.problem))

        for done, sample in enumerate(self.form.encoded(self.encoder, rows, refuse)):
            if done % _TICK_SAMPLES == 0:
                tick(done)
            counts.update(sample.counts)
            firsts = dict.fromkeys(sample.counts, sample.where) | firsts if sample.counts else firsts
            file.add(sample)
        said = {"unused": rows.unused, "counts": counts, "firsts": firsts, "tally": rows.tally}
        said |= {"skipped": skipped[:_SHOWN_PROBLEMS]}
        file.write(path, said | {"num_skipped": len(skipped)})

    def require_samples(self, said: Iterable[Mapping[str, Any]]) -> None:
        """Raises InvalidConfig if a file that was read whole has no readable row; `said` by its parts."""
        _, parts = self._parts()
        num_read: Counter[int] = Counter()
        for (origin, _), part in zip(parts, said, strict=False):
            num_read[origin] += part["tally"].get("read", 0)
        for index, file in enumerate(self.rows.origins):
            if not num_read[index] and self.rows.max_samples is None:
                raise InvalidConfig(f"{file.name}: no samples")


def _name(number: int, limit: int | None = None) -> str:
    return f"{number:06}{'' if limit is None else f'-{limit}'}.arrow"


def _processes() -> int:
    """Returns how many processes tokenize: this rank's share of the cores that it may use."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = min(os.cpu_count() or 1, _quota(Path("/sys/fs/cgroup/cpu.max")))
    return max(1, min(len(os.sched_getaffinity(0)), cores // ranks))


def _quota(file: Path) -> int:
    """Returns the cores that a container may use at a time; very many if it has no limit."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return _UNKNOWN


@lru_cache(maxsize=64)
def counts_of(counts: Counts) -> Mapping[str, int]:
    """Returns the counts of a conversation that are not 0, by their keys of `COUNTED`."""
    return MappingProxyType({name: count for name, count in asdict(counts).items() if count})


def fingerprint(rows: Rows, encoder: Encoder, job: Job, features: Iterable[str]) -> str:
    """Returns the key of the tokens in the cache: equal on all ranks, and different for any other input."""
    tokenizer, reading = encoder.tokenizer, rows.reading
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = {key: value for key, value in state.items() if key not in {"padding", "truncation"}}
    else:
        vocabulary = tokenizer.get_vocab()
    made_from = [
        *(dstrain.__version__, transformers.__version__, rows.identity, list(features)),
        *(reading.format.value, dict(reading.columns), reading.system),
        *(encoder.seq_len, encoder.loss_on.value, encoder.thinking.value, job.on_bad_row.value),
        *(type(tokenizer).__name__, tokenizer.chat_template, encoder.media_reader and encoder.media_reader.identity),
        *(tokenizer.special_tokens_map, vocabulary),
    ]
    return hashlib.sha256(json.dumps(made_from, default=str, sort_keys=True).encode()).hexdigest()[:32]
