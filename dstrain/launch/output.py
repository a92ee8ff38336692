"""What a run writes while it goes: the log of rank 0, passed on as it grows, and the launcher's own words."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from pathlib import Path

_FINISHED = re.compile(r"Process (\d+) exits successfully")
_FAILED = re.compile(r"^(?:(\S+): )?.*exits with return code = (-?\d+)")
_LOG = re.compile(r"\d{14}_rank(\d+)\.log")


class Tail:
    """A growing file, read piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Returns what was added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except OSError:
            return ""
        self._offset += len(raw)
        return self._decoder.decode(raw)


class Output:
    """The log files of one start."""

    def __init__(self, folder: Path, launcher_log: Path, on_output: Callable[[str], None]) -> None:
        """Files that are in `folder` already belong to earlier starts; `on_output` gets what rank 0 writes."""
        self._folder = folder
        self._earlier = frozenset(folder.iterdir()) if folder.is_dir() else frozenset()
        self._launcher = Tail(launcher_log)
        self._partial = ""
        self._rank0: Tail | None = None
        self._on_output = on_output
        self.finished: set[int] = set()
        """Process numbers of ranks on this machine of which the launcher said that they ended well."""
        self.num_finished = 0
        """How many ranks ended well on all nodes."""
        self.failed: tuple[str | None, int] | None = None
        """The node (None: this machine) and the code of the first failure that the launcher reported."""

    def rank_logs(self) -> dict[int, Path]:
        """Returns the log file of each rank of this start."""
        found = {}
        for path in sorted(self._folder.glob("*_rank*.log")):
            match = _LOG.fullmatch(path.name)
            if match is not None and path not in self._earlier:
                found[int(match[1])] = path
        return found

    def poll(self) -> None:
        """Passes on what is new."""
        lines = (self._partial + self._launcher.read()).split("\n")
        self._partial = lines.pop()
        for line in lines:
            self._note(line)
        if self._rank0 is None and 0 in (logs := self.rank_logs()):
            self._rank0 = Tail(logs[0])
        if self._rank0 is not None and (text := self._rank0.read()):
            self._on_output(text)

    def _note(self, line: str) -> None:
        finished, failed = _FINISHED.search(line), _FAILED.search(line)
        if finished is not None:
            self.finished.add(int(finished[1]))
            self.num_finished += 1
        elif failed is not None and self.failed is None:
            self.failed = (failed[1], int(failed[2]))
