"""The token cache: data sets in tokens, in files that every rank maps into memory and that the next run finds.

The folder of a data set is named by everything that its tokens depend on. Each part of its rows is a file, made by a
pool of processes and renamed when it is whole, so that a killed preparation leaves whole files only. One process of a
file system makes the missing files while the others wait for them and report how many exist.

`datasets.Dataset.map` also tokenizes in a pool, but it reports an error only when every process has finished, and keeps
nothing of a preparation that is killed; its files, tables and memory maps are used here.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow  # type: ignore[import-untyped]
import transformers

import dstrain
from dstrain.choices import DataFormat, OnBadRow
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data.rows import Part
from dstrain.job.schema import Job
from dstrain.paths import write_atomic
from dstrain.train.data.sources import Rows
from dstrain.train.data.tokenize import FIGURES, NUMBERS, Encoder, Form

_SHOWN_PROBLEMS = 5
_TICK_S = 0.5
_PARTS = "parts.json"
_UNKNOWN = 2**62
"""More rows than any limit."""

Report = Callable[[str, int, int], None]
"""Called with the name of a data set, the number of its finished samples, and their total, 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Remarks for the log about the rows of a data set, or of a part of it."""

    unused: Counter[str] = field(default_factory=Counter)
    """Unused column → number of samples with it."""
    counts: Counter[str] = field(default_factory=Counter)
    """Field of `chat.Counts` → its sum."""
    firsts: dict[str, str] = field(default_factory=dict)
    """Field of `chat.Counts` → the place of the first sample that it counts."""
    skipped: list[str] = field(default_factory=list)
    """The first problems of skipped rows."""
    tally: Counter[str] = field(default_factory=Counter)
    """`Rows.tally`, and `skipped`: the number of skipped rows."""

    def add(self, other: Said) -> None:
        """Adds what is said about the next rows."""
        for mine, more in ((self.unused, other.unused), (self.counts, other.counts), (self.tally, other.tally)):
            mine.update(more)
        for name, where in other.firsts.items():
            self.firsts.setdefault(name, where)
        self.skipped.extend(other.skipped[: _SHOWN_PROBLEMS - len(self.skipped)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a data set."""

    dataset: datasets.Dataset
    """Every sample; one without a token to learn has none."""
    said: Said
    num_made: int
    """Files that were missing."""
    folder: Path


def cache_folder() -> Path:
    """Returns the folder of all tokens in the cache of `datasets`, which HF_HOME or HF_DATASETS_CACHE move."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "dstrain"


@contextmanager
def alone(folder: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lets one process at a time work in a folder, and calls `waiting` now and then until it is this one's turn.

    The lock is free when its process ends, however it does. If the file system has no locks, processes work at once:
    they do the same work twice, and rename whole files.
    """
    with (folder / "lock").open("ab") as file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                waiting()
                time.sleep(_TICK_S)
                continue
            except OSError:
                pass
            break
        yield


@contextmanager
def made_beside(path: Path) -> Iterator[Path]:
    """Yields the path beside a file to write it to, and renames it when it is written."""
    beside = path.with_name(f"{path.stem}.{socket.gethostname()}-{os.getpid()}.part{path.suffix}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def tokenized(rows: Rows, encoder: Encoder, job: Job, report: Report, form: Form) -> Tokens:
    """Returns the tokens of a data set, from the cache as far as they are there.

    Raises InvalidConfig with file and line for an unusable row.
    """
    key = fingerprint(rows, encoder, job, form.features)
    folder = cache_folder() / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cache = _Cache(rows=rows, encoder=encoder, job=job, report=report, form=form, folder=folder)
        paths, num_made = cache.files()
        of_parts = list(map(_said_in, paths))
    except OSError as error:
        raise EnvironmentProblem(
            f"the tokens of {rows.name} cannot be written to {folder}: {error.strerror or error}",
            hint="Free some space, or set HF_DATASETS_CACHE to another folder.",
        ) from error
    cache.require_samples(of_parts)
    said = Said()
    for part in of_parts:
        said.add(part)
    # mapped, so that the ranks of a node share the pages
    tables = [datasets.table.MemoryMappedTable.from_file(str(path)) for path in paths]
    table = datasets.table.concat_tables(tables) if tables else form.features.arrow_schema.empty_table()
    info = datasets.DatasetInfo(features=form.features)
    dataset = datasets.Dataset(arrow_table=table, info=info, fingerprint=f"{key}-{rows.max_samples}")
    return Tokens(dataset=dataset, said=said, num_made=num_made, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The file of a part."""

    path: Path
    origin: int
    part: Part
    limit: int | None
    """The most samples of it; None: all."""

    @property
    def num_rows(self) -> int:
        """Rows for progress; 0 if unknown."""
        return self.part.num_rows if self.limit is None else min(self.part.num_rows, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """The files of a data set."""

    rows: Rows
    encoder: Encoder
    job: Job
    report: Report
    form: Form
    folder: Path

    def files(self) -> tuple[list[Path], int]:
        """Returns all files in order, after making the missing ones, and the number of these.

        With `max_samples` the parts that surely have no more are made together, and those after them one by one, since
        unusable rows do not count.
        """
        rows, parts = self._parts()
        limit = self.rows.max_samples
        ends = accumulate(part.num_rows or _UNKNOWN for _, part in parts)
        whole = len(parts) if limit is None else sum(end <= limit for end in ends)
        files = [self._file(number, *parts[number], None) for number in range(whole)]
        num_made = self._make(rows, files)
        if limit is not None:
            for number, (origin, part) in enumerate(parts[whole:], start=whole):
                remaining = limit - sum(_said_in(file.path).tally["usable"] for file in files)
                if remaining <= 0:
                    break
                at_most = None if 0 < part.num_rows <= remaining else remaining
                files.append(self._file(number, origin, part, at_most))
                num_made += self._make(rows, files[-1:])
        return [file.path for file in files], num_made

    def _file(self, number: int, origin: int, part: Part, limit: int | None) -> _File:
        name = f"{number:06}{'' if limit is None else f'-{limit}'}.arrow"
        return _File(path=self.folder / name, origin=origin, part=part, limit=limit)

    def _parts(self) -> tuple[Rows, list[tuple[int, Part]]]:
        """Returns the rows with their format, and all parts with the index of their origin; worked out once."""
        path, names = self.folder / _PARTS, [one.name for one in fields(Part)]
        if not path.exists():
            with alone(self.folder):
                if not path.exists():
                    rows = self.rows.detected()
                    parts = [(index, part) for index, origin in enumerate(rows.origins) for part in origin.parts()]
                    listed = [[index, *(getattr(part, name) for name in names)] for index, part in parts]
                    write_atomic(path, json.dumps({"format": rows.reading.format.value, "parts": listed}))
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = replace(self.rows, reading=replace(self.rows.reading, format=DataFormat(data["format"])))
        return rows, [(index, Part(**dict(zip(names, part, strict=True)))) for index, *part in data["parts"]]

    def _make(self, rows: Rows, files: Sequence[_File]) -> int:
        """Makes the files that are missing, or waits until another process has; returns how many were missing."""
        sizes = {file.path.name: file.num_rows for file in files}
        total = sum(sizes.values()) if all(sizes.values()) else 0
        reported = -1

        def tick() -> None:
            nonlocal reported
            done = sum(sizes.get(path.name, 0) for path in self.folder.iterdir())
            if done > reported:
                reported = done
                self.report(self.rows.name, done, total)

        missing = [file for file in files if not file.path.exists()]
        if not missing:
            return 0
        tick()
        with alone(self.folder, tick):
            for left in self.folder.glob("*.part*"):  # by processes that were killed
                left.unlink(missing_ok=True)
            gc.freeze()  # collections skip the objects of imported modules, which processes of the pool would copy
            try:
                _for_each(
                    [file for file in missing if not file.path.exists()],
                    lambda file: self._write(rows.of(file.origin, file.part, file.limit), file.path),
                    tick,
                )
            finally:
                gc.unfreeze()
        tick()
        return len(missing)

    def _write(self, rows: Rows, path: Path) -> None:
        """Writes the tokens of the rows of a part."""
        said = Said()

        def refuse(error: InvalidConfig) -> None:
            if self.job.on_bad_row is OnBadRow.STOP:
                raise error
            said.tally["skipped"] += 1
            said.skipped.append(str(error.problem))

        columns: dict[str, list[Any]] = {name: [] for name in self.form.features}
        for sample in self.form.encoded(self.encoder, rows, refuse):
            said.counts.update(sample.counts)
            for name in sample.counts:
                said.firsts.setdefault(name, sample.where)
            crc = 0
            for name, values in sample.columns.items():
                # 4 bytes a token, in place of a Python object
                kept = array("i", values) if self.form.columns[name] == NUMBERS else values
                columns[name].append(kept)
                crc = _checksum(kept, crc)
            for name in FIGURES:
                columns[name].append(getattr(sample, name))
            columns["crc"].append(crc)
        said.unused.update(rows.unused)
        said.tally.update(rows.tally)
        del said.skipped[_SHOWN_PROBLEMS:]
        # a part is there whole or not at all, whatever ends this process
        with made_beside(path) as beside:
            _write_table(beside, self.form.features, columns, said)

    def require_samples(self, said: Iterable[Said]) -> None:
        """Raises InvalidConfig if a file that was read whole has no readable row; `said` by its parts."""
        num_read: Counter[int] = Counter()
        for (origin, _), part in zip(self._parts()[1], said, strict=False):
            num_read[origin] += part.tally["read"]
        for index, file in enumerate(self.rows.origins):
            if not num_read[index] and self.rows.max_samples is None:
                raise InvalidConfig(f"{file.name}: no samples")


def _checksum(values: Sequence[Any], crc: int) -> int:
    """Returns a checksum with the values of a sample: numbers, strings, or lists of either."""
    if isinstance(values, array):
        return zlib.crc32(values, crc)
    if values and isinstance(values[0], str):
        return zlib.crc32("\n".join(values).encode(), crc)
    for part in values:
        is_text = bool(part) and isinstance(part[0], str)
        crc = zlib.crc32("\n".join([*part, ""]).encode() if is_text else array("i", part), crc)
    return crc


def _write_table(path: Path, features: datasets.Features, columns: Mapping[str, list[Any]], said: Said) -> None:
    """Writes the samples of a part, with the remarks in the metadata, so that both are whole or missing."""
    about = json.dumps({one.name: getattr(said, one.name) for one in fields(said)})
    schema = features.arrow_schema
    schema = schema.with_metadata({**schema.metadata, b"dstrain": about.encode()})
    arrays = []
    for name, values in columns.items():
        if features[name] == NUMBERS and values:  # many times as fast as from lists of Python's numbers
            ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
            arrays.append(pyarrow.ListArray.from_arrays(ends, np.frombuffer(b"".join(values), np.int32)))
        else:
            arrays.append(pyarrow.array(values, schema.field(name).type))
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        stream.write_table(pyarrow.table(arrays, schema=schema))


def _said_in(path: Path) -> Said:
    """Returns the remarks about the samples of a file."""
    with pyarrow.memory_map(str(path)) as file:
        said = json.loads(pyarrow.ipc.open_stream(file).schema.metadata[b"dstrain"])
    counters = {name: Counter(said[name]) for name in ("unused", "counts", "tally")}
    return Said(**counters, firsts=said["firsts"], skipped=said["skipped"])


def _for_each(files: Sequence[_File], make: Callable[[_File], None], tick: Callable[[], None]) -> None:
    """Makes files over a pool of processes. Raises the first error of one, and EnvironmentProblem if one was killed."""
    processes = min(_processes(), len(files))
    if processes <= 1:
        for file in files:
            make(file)
            tick()
        return
    context = multiprocessing.get_context("fork")  # as PyTorch's data loaders: nothing is loaded again
    with (
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),
        ProcessPoolExecutor(processes, context, _begin, (make, os.getpid())) as pool,
    ):
        waiting = {pool.submit(_run, file) for file in files}
        children = multiprocessing.active_children()
        try:
            while waiting:
                done, waiting = wait(waiting, _TICK_S, FIRST_COMPLETED)
                for one in done:
                    one.result()
                tick()
        except BrokenProcessPool:
            for child in children:
                child.join(_TICK_S)  # its exit code may not be there yet
            codes = {child.exitcode or 0 for child in children} - {0, -signal.SIGTERM}
            name = signal.Signals(-min(codes)).name if codes and min(codes) < 0 else "the system"
            hint = "Often memory ran out (dmesg). Type the same again: finished parts are kept."
            raise EnvironmentProblem(f"a process that tokenizes was ended by {name}", hint=hint) from None
        except BaseException:
            for child in children:
                child.terminate()
            raise


_make: Callable[[_File], None]
"""Makes a file; only the processes of the pool have it."""


def _begin(make: Callable[[_File], None], parent: int) -> None:
    """Prepares a process of the pool, which ends when its parent has ended."""
    global _make
    _make = make
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # all cores have processes

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_TICK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(file: _File) -> None:
    _make(file)


def _processes() -> int:
    """Returns how many processes tokenize: as many as there are cores that this one may use."""
    cores = min(os.cpu_count() or 1, _quota(Path("/sys/fs/cgroup/cpu.max")))
    return max(1, min(len(os.sched_getaffinity(0)), cores))


def _quota(file: Path) -> int:
    """Returns the cores that a container may use at a time; very many if it has no limit."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return _UNKNOWN


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
