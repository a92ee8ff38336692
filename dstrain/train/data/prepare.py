"""Prepares a rank's data: data sets tokenized, counted, mixed by their weights, and packed."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from dstrain import units
from dstrain.choices import OnLongSample
from dstrain.errors import InvalidConfig
from dstrain.facts.data.columns import MEDIA, unusable, unused_text
from dstrain.job import limits
from dstrain.job.data_source import DataSource, epoch_counts, held_out_counts, weights_of
from dstrain.job.schema import Job
from dstrain.train.data.collate import PackedRows, Packing, packed
from dstrain.train.data.sources import Rows, rows_of
from dstrain.train.data.token_cache import Report, Said, alone, cache_folder, made_beside, tokenized
from dstrain.train.data.tokenize import SEQUENCES, Encoder, Form, counted

Indices = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Numbers of samples, (samples,)."""


def numbers_of(is_chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Indices:
    """Returns the numbers of the samples that are marked, (samples,), in four bytes each where these are enough.

    >>> numbers_of(np.array([True, False, True])).tolist()
    [0, 2]
    """
    numbers: Indices = np.arange(len(is_chosen), dtype=np.int32 if len(is_chosen) < 2**31 else np.int64)
    return numbers if is_chosen.all() else numbers[is_chosen]


def drawn(size: int, count: int, *, seed: int, index: int) -> Indices:
    """Returns `count` of `size` sample numbers in ascending order, random but the same for the same seed.

    Each sample occurs `count // size` times, and a random part of them once more. `index` is the data set's.

    >>> drawn(3, 7, seed=0, index=0).tolist() in ([0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2, 2])
    True
    """
    whole, rest = divmod(count, size)
    order = np.random.default_rng([seed, index]).permutation(size)[:rest]
    return np.sort(np.concatenate([np.tile(np.arange(size), whole), order]))


def split(indices: Indices, count: int, *, seed: int, index: int) -> tuple[Indices, Indices]:
    """Returns the samples to train on, and `count` held-out ones, each in their order."""
    chosen = drawn(len(indices), count, seed=seed, index=index)
    is_held_out = np.zeros(len(indices), dtype=bool)
    is_held_out[chosen] = True
    return indices[~is_held_out], indices[is_held_out]


_DIGESTED_SAMPLES = 2**20
_PACKING = "by length"
"""Changes with the order in which the same samples share rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Tokenized data for the Trainer and `collate.Collator`."""

    dataset: Any
    """`datasets.Dataset` with `input_ids`, `labels` and `length`, `PackedRows`, or the data set of a `Form`."""
    num_samples: int
    """Samples of an epoch."""
    num_tokens: int
    """Tokens of an epoch, without padding."""
    num_learned: int
    """Tokens with loss."""
    notes: tuple[str, ...]
    """Lines for the log."""
    digest: str
    """Changes with any token, any label, any file of an image or a video, and the order of samples."""
    media: frozenset[str]
    """The columns of images and videos that a sample has."""
    num_made: int
    """Files of tokens that were not in the cache."""
    folders: tuple[Path, ...]
    """Where the tokens are, by data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The tokens of one data set."""

    name: str
    dataset: datasets.Dataset
    kept: Indices
    """Samples that are trained on."""
    notes: list[str]
    num_made: int
    folder: Path


def _silent(name: str, done: int, total: int) -> None:
    """Reports nothing."""


def prepare(
    job: Job, tokenizer: Any, *, training: bool, report: Report = _silent, form: Form = SEQUENCES
) -> PreparedData:
    """Returns the tokenized data of a job: samples in order, or with packing rows of `seq_len` tokens.

    Without `training` it is the evaluation data. All ranks call it, and `dstrain data prepare`: one process of
    those that see a cache makes what is missing, the others wait for it and call `report`, and all read the same files.
    Raises InvalidConfig with file and line for an unusable row.
    """
    has_own = training or job.eval_data is not None
    sources = job.train_sources if training or not has_own else job.eval_sources
    settings: dict[str, Any] = {"loss_on": form.loss_on or job.loss_on, "thinking": job.thinking}
    encoder = Encoder(tokenizer=tokenizer, seq_len=job.seq_len, media_reader=form.media_reader, **settings)
    data = _rows(job, sources, training=training or not has_own)
    tokens = [_tokens(rows, encoder, job, report, form) for rows in data]
    chosen = _chosen(job, sources, tokens, training=training)
    # nothing is copied: tables stay memory maps, and samples are chosen by their numbers
    dataset = datasets.concatenate_datasets(list(map(_selected, tokens, chosen)))
    dataset = form.whole(dataset.select_columns([*form.columns, "length"]))
    notes = [note for one in tokens for note in one.notes] if training or has_own else []
    notes += _mixture_notes(job, sources, tokens, chosen, training=training)
    # a resumed run compares it, and refuses other data than it was trained on
    digest = _digest(_column(tokens, chosen, "crc"), job)
    num_learned = int(_column(tokens, chosen, "num_learned").sum(dtype=np.int64))
    lengths = _column(tokens, chosen, "length")
    if job.packing:
        name = "evaluation" if not training else tokens[0].name if len(tokens) == 1 else "data"
        dataset, note = _packed(dataset, lengths, job, name, digest)
        notes += [note, *_image_notes(name, job, form)]
    return PreparedData(
        dataset=dataset,
        num_samples=len(lengths),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        num_learned=num_learned,
        notes=tuple(notes),
        digest=digest,
        media=_media(tokens, chosen),
        num_made=sum(one.num_made for one in tokens),
        folders=tuple(one.folder for one in tokens),
    )


def _rows(job: Job, sources: Sequence[DataSource], *, training: bool) -> list[Rows]:
    """Returns the rows of each data set.

    Raises InvalidConfig for weights that only some of them have, and for a `val_split` that leaves no sample even if
    all rows are usable. The launcher has counted the rows of files; these are the rows of a hub.
    """
    weights_of(sources)
    data = [rows_of(source, job, training=training) for source in sources]
    if job.val_split is not None and all(origin.path is None for rows in data for origin in rows.origins):
        sizes = [sum(part.num_rows for origin in rows.origins for part in origin.parts()) for rows in data]
        most = [min(size, rows.max_samples or size) for size, rows in zip(sizes, data, strict=True)]
        held_out_counts(most, job.val_split)
    return data


def _tokens(rows: Rows, encoder: Encoder, job: Job, report: Report, form: Form) -> _Tokens:
    """Returns the tokens of a data set. Raises InvalidConfig if no sample of it can be trained on."""
    tokens = tokenized(rows, encoder, job, report, form)
    dataset, said = tokens.dataset, tokens.said
    if media := [name for name in MEDIA if _figure(dataset, f"num_{name}").any()]:
        packs = form.media_reader is not None and form.media_reader.positions is not None
        limits.require_for_media(job, media, packs=packs)
    lengths, is_long = _figure(dataset, "length"), _figure(dataset, "num_cut") > 0
    # both kinds stay in the cache, so that another on_long_sample costs no tokenization
    drops_long = job.on_long_sample is OnLongSample.DROP
    is_kept = (lengths > 0) & ~is_long if drops_long else lengths > 0
    kept = numbers_of(is_kept)
    remarks = _remarks(rows.name, said, job)
    if not len(kept):
        limit = f"{job.seq_len:,} tokens" if drops_long else f"its first {job.seq_len:,}"
        problem = f"of {units.counted(len(lengths), 'sample')} none has a token of an answer among {limit}"
        raise InvalidConfig("\n".join([f"{rows.name}: {problem}", *remarks]), hint="Raise seq_len.")
    num_learned = int(_figure(dataset, "num_learned").sum(where=is_kept, dtype=np.int64))
    notes = [_sizes(rows.name, lengths if is_kept.all() else lengths[is_kept], num_learned)]
    num_empty = int((lengths == 0).sum())
    if num_long := int(is_long.sum()):
        share, done = num_long / len(lengths), "dropped (on_long_sample)" if drops_long else "truncated"
        notes.append(
            f"{rows.name}: longer than seq_len {job.seq_len:,} and {done}: "
            f"{units.counted(num_long, 'sample')} ({share:.1%})"
        )
    if num_empty:
        notes.append(f"{rows.name}: without a token to learn and dropped: {units.counted(num_empty, 'sample')}")
    return _Tokens(
        name=rows.name,
        dataset=dataset,
        kept=kept,
        notes=[*notes, *remarks],
        num_made=tokens.num_made,
        folder=tokens.folder,
    )


def _chosen(job: Job, sources: Sequence[DataSource], tokens: Sequence[_Tokens], *, training: bool) -> list[Indices]:
    """Returns the samples of an epoch, by data set: those not held out, by the weights; or those for evaluation."""
    kept = [one.kept for one in tokens]
    if job.val_split is not None:
        held_out = held_out_counts([len(rows) for rows in kept], job.val_split)
        parts = [
            split(rows, count, seed=job.seed, index=i)
            for i, (rows, count) in enumerate(zip(kept, held_out, strict=True))
        ]
        kept = [train if training else evaluation for train, evaluation in parts]
        if not training:
            return kept
    weights = weights_of(sources)
    if weights is None:
        return kept
    counts = epoch_counts([len(rows) for rows in kept], weights, job.stopping_strategy)
    return [
        rows[drawn(len(rows), count, seed=job.seed, index=index)]
        for index, (rows, count) in enumerate(zip(kept, counts, strict=True))
    ]


def _selected(tokens: _Tokens, rows: Indices) -> datasets.Dataset:
    """Returns samples of a data set; all of them without a list of their numbers.

    `Dataset.select` writes the numbers in batches of 1,000, which takes up to 60 bytes each; one column takes eight.
    """
    dataset = tokens.dataset
    if _is_whole(rows, dataset):
        return dataset
    numbers = datasets.table.InMemoryTable(pa.table({"indices": pa.array(rows, pa.uint64())}))
    return datasets.Dataset(dataset.data, info=dataset.info, indices_table=numbers, fingerprint=uuid.uuid4().hex[:16])


def _column(tokens: Sequence[_Tokens], chosen: Sequence[Indices], name: str) -> Any:
    """Returns a column of the samples of an epoch, (samples,)."""
    figures = []
    for one, rows in zip(tokens, chosen, strict=True):
        figure = _figure(one.dataset, name)
        figures.append(figure if _is_whole(rows, one.dataset) else figure[rows])
    return figures[0] if len(figures) == 1 else np.concatenate(figures)


def _media(tokens: Sequence[_Tokens], chosen: Sequence[Indices]) -> frozenset[str]:
    """Returns which of images and videos an epoch has.

    Then gives back the memory of columns: these are the last ones to be read.
    """
    found = frozenset(name for name in MEDIA if _column(tokens, chosen, f"num_{name}").any())
    pa.default_memory_pool().release_unused()
    return found


def _is_whole(rows: Indices, dataset: datasets.Dataset) -> bool:
    """Returns whether these are all samples of a data set in their order."""
    return len(rows) == len(dataset) and bool((rows[1:] > rows[:-1]).all())


def _figure(dataset: datasets.Dataset, name: str) -> Any:
    """Returns a column of all samples of a data set, (samples,), in its own type: four bytes a sample."""
    return dataset.data.column(name).to_numpy()


def _packed(dataset: Any, lengths: Any, job: Job, name: str, digest: str) -> tuple[PackedRows, str]:
    """Returns rows of whole samples, made by the first rank that asks, and a line for the log."""
    rows = kept_rows(cache_folder() / f"packed-{digest}", lengths, job.seq_len, seed=job.seed)
    filled = int(lengths.sum(dtype=np.int64)) / (len(rows) * job.seq_len)
    note = f"{name}: packed into {units.counted(len(rows), 'row')} of {job.seq_len:,} tokens, {filled:.1%} filled"
    return PackedRows(samples=dataset.with_format("arrow"), rows=rows), note


def _image_notes(name: str, job: Job, form: Form) -> list[str]:
    """Returns a line for the log about the images that a packed row may hold."""
    if form.media_reader is None or form.media_reader.positions is None:
        return []
    side = form.media_reader.positions.token_side
    return [f"{name}: a row has at most {job.seq_len:,} tokens of images, each of {side} × {side} pixels"]


def _digest(crcs: Any, job: Job) -> str:
    """Returns the digest of the samples' checksums, (samples,) uint32, and of the settings that decide their order."""
    order = f"{job.seed} {job.packing and _PACKING} {job.seq_len}".encode()
    digest = hashlib.sha256()
    for start in range(0, len(crcs), _DIGESTED_SAMPLES):
        digest.update(crcs[start : start + _DIGESTED_SAMPLES].astype(np.int64).tobytes())
    digest.update(order)
    return digest.hexdigest()[:16]


def _sizes(name: str, lengths: Any, num_learned: int) -> str:
    tokens = int(lengths.sum(dtype=np.int64))
    return (
        f"{name}: {units.counted(len(lengths), 'sample')}, {tokens:,} tokens ({tokens / len(lengths):.0f} on average, "
        f"{int(lengths.max()):,} at most), {num_learned:,} ({num_learned / tokens:.1%}) with loss"
    )


def _mixture_notes(
    job: Job, sources: Sequence[DataSource], tokens: Sequence[_Tokens], chosen: Sequence[Indices], *, training: bool
) -> list[str]:
    """Returns lines about held-out samples and about the samples of an epoch, by data set."""
    total = sum(map(len, chosen))
    if job.val_split is not None and not training:
        return [f"val_split {job.val_split:g}: {units.counted(total, 'sample')} for evaluation"]
    if len(tokens) == 1:
        return []
    weights = weights_of(sources)
    lines = [f"an epoch has {units.counted(total, 'sample')} of {len(tokens)} data sets:"]
    for index, (one, rows) in enumerate(zip(tokens, chosen, strict=True)):
        weight = f", weight {weights[index]:g}" if weights else ""
        lines.append(f"  {one.name}: {len(rows):,} from {len(one.kept):,} samples ({len(rows) / total:.1%}{weight})")
    return lines


def _remarks(name: str, said: Said, job: Job) -> list[str]:
    """Returns lines for the log about unused columns, answers, and skipped rows."""
    notes = [unused_text(said.unused)] if said.unused else []
    notes += counted(said.counts, job, said.firsts)
    if said.skipped:
        notes.append(f"{unusable(said.tally['skipped'])} skipped (on_bad_row: skip); the first:")
    return [f"{name}: {note}" for note in notes] + [f"  {problem}" for problem in said.skipped]


_PACKING_FILES = ("members.npy", "starts.npy")


def kept_rows(folder: Path, lengths: Any, capacity: int, *, seed: int) -> Packing:
    """Returns rows mapped into memory from a folder, after making them there if no other rank did."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in _PACKING_FILES]
    if not all(path.exists() for path in paths):
        with alone(folder):
            if not all(path.exists() for path in paths):
                made = packed(lengths, capacity, seed=seed)
                for path, values in zip(paths, (made.members, made.starts), strict=True):
                    with made_beside(path) as beside:
                        np.save(beside, values)
    members, starts = (np.load(path, mmap_mode="r") for path in paths)
    return Packing(members=members, starts=starts)
