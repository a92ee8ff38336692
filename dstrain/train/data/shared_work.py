"""Makes files once each, by processes of this machine and of others that see the same folder.

A file is written beside its place and renamed, so it is whole or missing, however its maker ends. Locks only keep two
processes from making the same file: where a file system has none, work is done twice and nothing is damaged.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError, EnvironmentProblem

Tick = Callable[[int], None]
"""Called with the rows of a file that are done, now and then while it is made."""
_WAIT_S = 0.2
_LISTED_S = 1.0
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Files to make in a folder."""

    folder: Path
    names: Sequence[str]
    sizes: Sequence[int]
    """Rows of each, for progress; 0 if unknown."""
    make: Callable[[int, Path, Tick], None]
    """Writes the file of an index to a path."""

    def missing(self) -> list[int]:
        """Returns the indices of files that do not exist."""
        present = {path.name for path in self.folder.iterdir()}
        return [index for index, name in enumerate(self.names) if name not in present]

    def has(self, index: int) -> bool:
        """Returns whether a file exists."""
        return (self.folder / self.names[index]).exists()


@contextmanager
def locked(folder: Path, name: str, *, waits: bool = False) -> Iterator[bool | None]:
    """Yields whether this process has the lock of a name: a byte of the folder's lock file, free when the process ends.

    A process may have one lock of a folder at a time. Yields None if the file system has no locks.
    """
    with (folder / _LOCK).open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, zlib.crc32(name.encode()))
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError:
            yield None
            return
        yield True


def make_all(work: Work, *, processes: int, report: Tick) -> int:
    """Makes the files that are missing, over so many processes at most; returns how many were missing.

    `report` is called with the rows of finished files and of those at work. Raises the first error of a process, and
    EnvironmentProblem if one was killed.
    """
    missing = work.missing()
    if not missing:
        return 0
    progress = _Progress(work, report)
    progress(0)
    if min(processes, len(missing)) == 1:
        _take(work, progress)
    else:
        _fork(work, min(processes, len(missing)), progress)
    progress.end()
    return len(missing)


class _Progress:
    """Reports rows, which never decrease."""

    def __init__(self, work: Work, report: Tick) -> None:
        self._work, self._report = work, report
        self._listed, self._finished, self._last = -_LISTED_S, 0, -1

    def __call__(self, at_work: int) -> None:
        """Reports the rows of finished files, looked up once a second, and `at_work`."""
        if time.monotonic() - self._listed < _LISTED_S:
            return
        missing = set(self._work.missing())
        self._finished = sum(size for index, size in enumerate(self._work.sizes) if index not in missing)
        self._listed = time.monotonic()
        self._say(self._finished + at_work)

    def end(self) -> None:
        """Reports all rows."""
        self._say(sum(self._work.sizes))

    def _say(self, rows: int) -> None:
        if rows > self._last:
            self._last = rows
            self._report(rows)


def _take(work: Work, tick: Tick) -> None:
    """Makes missing files that no other process makes, until all exist; those of a process that ended are made here."""
    waiting, refused = deque(work.missing()), 0
    while waiting:
        index = waiting.popleft()
        if work.has(index):
            continue
        with locked(work.folder, work.names[index]) as is_mine:
            if is_mine is not False:
                refused = 0
                if not work.has(index):
                    if is_mine:
                        _remove_leftovers(work, index)
                    _make(work, index, tick)
                    tick(0)
                continue
        waiting.append(index)
        refused += 1
        if refused >= len(waiting):
            refused = 0
            tick(0)
            time.sleep(_WAIT_S)


def _remove_leftovers(work: Work, index: int) -> None:
    """Removes what killed processes left of a file; under its lock, or the file of a process at work would go."""
    for left in work.folder.glob(f"{work.names[index]}.*.part"):
        left.unlink(missing_ok=True)


def _make(work: Work, index: int, tick: Tick) -> None:
    name = work.names[index]
    path = work.folder / f"{name}.{socket.gethostname()}-{os.getpid()}.part"
    try:
        work.make(index, path, tick)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(work.folder / name)
    finally:
        path.unlink(missing_ok=True)


def _fork(work: Work, processes: int, progress: Tick) -> None:
    """Makes the missing files over forked processes, as PyTorch's data loaders fork: nothing is loaded again."""
    context = multiprocessing.get_context("fork")
    counts, errors = context.RawArray("q", processes), context.SimpleQueue()
    arguments = (work, counts, errors, os.getpid())
    children = [context.Process(target=_child, args=(number, *arguments), daemon=True) for number in range(processes)]
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            for child in children:
                child.start()
        while alive := [child.sentinel for child in children if child.exitcode is None]:
            wait(alive, _WAIT_S)
            progress(sum(counts))
            if not errors.empty():
                kind, problem, hint = errors.get()
                raise kind(problem, hint=hint)
            _require_well(children)
        _require_well(children)
    finally:
        for child in children:
            child.terminate()
            child.join()


def _require_well(children: Sequence[Any]) -> None:
    """Raises EnvironmentProblem if a process was killed, and RuntimeError if it ended with a bug."""
    for child in children:
        code = child.exitcode  # asks the system each time, so it is read once
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "Often memory ran out (dmesg). Type the same again: finished parts are kept."
            raise EnvironmentProblem(f"a process that tokenizes was ended by {name}", hint=hint)
        if code:
            raise RuntimeError("a process that tokenizes failed; its traceback is above")


def _child(number: int, work: Work, counts: Any, errors: Any, parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # all cores have processes
    gc.freeze()  # collections skip the objects of the parent, which they would copy

    def tick(done: int) -> None:
        counts[number] = done
        if os.getppid() != parent:
            os._exit(1)

    try:
        _take(work, tick)
    except DstrainError as error:
        errors.put((type(error), error.problem, error.hint))
    except OSError as error:
        hint = "Free some space, or set HF_DATASETS_CACHE to another folder."
        errors.put((EnvironmentProblem, f"{work.folder} cannot be written: {error.strerror or error}", hint))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
