"""Follows what a run writes on one node: rank logs, the launcher's output, and the last metrics."""

from __future__ import annotations

import codecs
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.rundir import RunDir
from dstrain.units import format_bytes

MOST_BYTES = 2**20
"""Bytes of a file that are read at once."""
_MOST_BEHIND = 8 * MOST_BYTES
"""Bytes that wait in a rank's log before the older ones are left out."""
_FINISHED = re.compile(r"Process (\d+) exits successfully")
_FAILED = re.compile(r"exits with return code = (-?\d+)")
_LOG = re.compile(r"\d{14}_rank(\d+)\.log")


class Tail:
    """Reads a growing file piece by piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, *, most_behind: int | None = None) -> str:
        """Returns the text added since the last call, up to the size of one message.

        If more than `most_behind` bytes wait, continues with the last piece, and says how much is left out.
        """
        note = ""
        try:
            with self.path.open("rb") as file:
                waiting = file.seek(0, 2) - self._offset
                if most_behind is not None and waiting > most_behind:
                    note = left_out(waiting - MOST_BYTES, self.path)
                    self._offset += waiting - MOST_BYTES
                    self._decoder.reset()
                file.seek(self._offset)
                raw = file.read(MOST_BYTES)
        except OSError:
            return ""
        self._offset += len(raw)
        return note + self._decoder.decode(raw)


def left_out(num_bytes: int, path: Path) -> str:
    """Returns the note in place of output that was too long to pass on."""
    size = format_bytes(num_bytes)
    return f"\n[dstrain: {size} of output left out here; all of it is in {path} on this rank's node]\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text added to a file."""

    path: Path
    text: str
    """The text that was added."""
    rank: int | None
    """The rank that wrote it; None for the launcher."""


_TAIL_BYTES = 64 * 1024


def tail_of(path: Path) -> str:
    """Returns the last 64 KiB of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def files(folder: Path) -> frozenset[Path]:
    """Returns the files of a folder; none if it does not exist."""
    return frozenset(folder.iterdir()) if folder.is_dir() else frozenset()


def rank_logs(folder: Path, earlier: Collection[Path]) -> dict[int, Path]:
    """Returns the log file of each rank, without earlier starts."""
    logs = {}
    for path in sorted(folder.glob("*_rank*.log")):
        match = _LOG.fullmatch(path.name)
        if match is not None and path not in earlier:
            logs[int(match[1])] = path
    return logs


def agents_words(folder: Path, since: float) -> list[str]:
    """Returns the messages that agents wrote on their own since a time in seconds since the epoch, such as that
    `run` was gone."""
    lines = []
    for path in sorted(folder.glob("watch_*.log")):
        if path.stat().st_mtime >= since:
            lines += path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return lines


class Output:
    """The log files of one start on one node."""

    def __init__(self, folder: Path, launcher_log: Path, ranks: Iterable[int]) -> None:
        """Reads the logs of `ranks`; files that are in `folder` already belong to earlier starts."""
        self._folder = folder
        self._earlier = files(folder)
        self._launcher = Tail(launcher_log)
        self._partial = ""
        self._missing = set(ranks)
        self._tails: dict[int, Tail] = {}
        self.finished: set[int] = set()
        """Process numbers of ranks on this machine that succeeded, according to the launcher."""
        self.num_finished = 0
        """How many ranks succeeded, according to the launcher."""
        self.failed: int | None = None
        """The code of the first failure that the launcher reported."""

    def poll(self, *, reads_ranks: bool = True, is_last: bool = False) -> list[Piece]:
        """Returns the text added since the last call; of a rank that writes faster than it is read, the last part.

        Logs of ranks wait if not `reads_ranks`; `is_last` takes their last piece alone.
        """
        text = self._launcher.read()
        pieces = [Piece(self._launcher.path, text, None)] if text else []
        lines = (self._partial + text).split("\n")
        self._partial = lines.pop()
        for line in lines:
            self._note(line)
        if self._missing:
            for rank, path in rank_logs(self._folder, self._earlier).items():
                if rank in self._missing:
                    self._missing.remove(rank)
                    self._tails[rank] = Tail(path)
        for rank, tail in sorted(self._tails.items()) if reads_ranks else ():
            if added := tail.read(most_behind=MOST_BYTES if is_last else _MOST_BEHIND):
                pieces.append(Piece(tail.path, added, rank))
        return pieces

    def _note(self, line: str) -> None:
        finished, failed = _FINISHED.search(line), _FAILED.search(line)
        if finished is not None:
            self.finished.add(int(finished[1]))
            self.num_finished += 1
        elif failed is not None and self.failed is None:
            self.failed = int(failed[1])


def last_metrics(run_dir: RunDir) -> dict[str, Any] | None:
    """Returns the newest line of the metrics that has a loss; a line that is still being written does not count."""
    for line in reversed(tail_of(run_dir.metrics).splitlines()):
        with suppress(ValueError):
            record = json.loads(line)
            if "step" in record and isinstance(record.get("loss"), int | float):
                return dict(record)
    return None


def metrics_words(record: Mapping[str, Any]) -> str:
    """Returns a line of the metrics in words, which begin with the number of its step.

    >>> metrics_words({"step": 7, "loss": 2.5, "tokens_per_s": 1234.5})
    '7, loss 2.5000, 1,234 tokens/s'
    """
    speed = f", {record['tokens_per_s']:,.0f} tokens/s" if record.get("tokens_per_s") else ""
    return f"{record['step']}, loss {record['loss']:.4f}{speed}"


_ERROR = re.compile(r"^(\[rank\d+\]: ?)?(Traceback \(most recent call last\):|Error: .)", re.MULTILINE)
_MOST_S = 60.0
"""How long an error is held back if no rank does another step; a run that fails ends within that time."""


class HeldOutput:
    """Passes on text, but for an error and what follows it: a rank that lost its peer would seem to be the cause."""

    def __init__(self, pass_on: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._pass_on = pass_on
        self._clock = clock
        self._held = ""
        self._since = 0.0
        self._step: int | None = None

    def take(self, text: str) -> None:
        """Takes a piece of rank 0's output."""
        error = None if self._held else _ERROR.search(text)
        if error is not None:
            self._since, self._step = self._clock(), None
        at = 0 if self._held else len(text) if error is None else error.start()
        self._held += text[at:]
        if at:
            self._pass_on(text[:at])

    def tick(self, step: int | None) -> None:
        """Passes on an error that the run has survived: the slowest rank does steps after it, or time passes."""
        if self._held:
            self._step = step if self._step is None else self._step
            if (step or 0) > (self._step or 0) + 1 or self._clock() - self._since > _MOST_S:
                self.release()

    def release(self) -> None:
        """Passes on what is held back."""
        held, self._held = self._held, ""
        if held:
            self._pass_on(held)

    def drop(self) -> None:
        """Forgets what is held back, since the report of the run says it, or the log."""
        self._held = ""
