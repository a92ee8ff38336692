"""Finds the processes of one run on this machine by a mark in their environment, and watches and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dstrain.heartbeat import MARK
from dstrain.launch.failure.outcome import Death

_PROC = Path("/proc")
_SCAN_S = 0.5
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as /proc shows it."""

    pid: int
    state: str
    """One letter; `Z` has ended and waits to be collected."""
    parent: int
    """Process number of its current parent."""
    session: int
    """Number of its session's leader."""
    start: int
    """When it started, in clock ticks since boot; with `pid` it identifies the process."""
    exit_code: int
    """Exit code once it has ended, negative for a signal."""


def look(pid: int) -> Process | None:
    """Returns the process with this id, or None if it does not exist. Source: proc(5), /proc/PID/stat."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    words = text.rpartition(b")")[2].split()
    return Process(
        pid=pid,
        state=words[0].decode(),
        parent=int(words[1]),
        session=int(words[3]),
        start=int(words[19]),
        exit_code=os.waitstatus_to_exitcode(int(words[49])),
    )


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment with which a process was started; empty if it cannot be read."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes descendants whose parent dies ours instead of init's, so that a killed launcher hides none of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class ProcessTree:
    """The launcher of one run and everything that came of it on this machine."""

    def __init__(self, mark: str, launcher: int) -> None:
        """`mark` is the value of `MARK`, `launcher` the launcher's process number and the number of its session."""
        self._mark = mark
        self._launcher = launcher
        self._known: dict[int, int] = {}

    def alive(self) -> list[int]:
        """Returns the processes of this run that have not ended: by mark, or by session if they descend from us."""
        processes = [process for pid in _pids() if (process := look(pid)) is not None]
        parents = {process.pid: process.parent for process in processes}
        living = []
        for process in processes:
            if self._is_ours(process, parents):
                self._known[process.pid] = process.start
                living.append(process.pid)
        return living

    def _is_ours(self, process: Process, parents: dict[int, int]) -> bool:
        if process.state in "ZX":
            return False
        if environment_of(process.pid).get(MARK) == self._mark:
            return True
        return process.session == self._launcher and _descends_from(os.getpid(), process.pid, parents)

    def collect(self) -> None:
        """Collects adopted processes that have ended; the launcher itself is its `Popen`'s to collect."""
        for process in (look(pid) for pid in _pids()):
            if process is None or process.state != "Z" or process.parent != os.getpid():
                continue
            is_ours = process.session == self._launcher or self._known.get(process.pid) == process.start
            if is_ours and process.pid != self._launcher:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every process of this run."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def ranks(self) -> dict[int, Process]:
        """Returns the ranks among the living: of the processes that carry a rank's number, the one that was first."""
        first_processes: dict[int, Process] = {}
        for pid in self.alive():
            rank = environment_of(pid).get("RANK", "")
            process = look(pid)
            if process is None or not rank.isdigit():
                continue
            first = first_processes.get(int(rank))
            if first is None or (process.start, pid) < (first.start, first.pid):
                first_processes[int(rank)] = process
        return first_processes


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _descends_from(ancestor: int, pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


class RankWatch:
    """Notices when ranks end and with which code, in the moment before the launcher collects them."""

    def __init__(self, family: ProcessTree, num_ranks: int) -> None:
        """Looks for ranks every `_SCAN_S` seconds until `num_ranks` were seen; each `poll` looks at those only."""
        self._family = family
        self._num_ranks = num_ranks
        self._next_scan = 0.0
        self._living: dict[int, Process] = {}
        self._handles: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self.deaths: dict[int, Death] = {}
        """Ranks that ended badly; the code is None for one that was collected before we looked."""
        self.ended: dict[int, float] = {}
        """Ranks that ended with code 0 → when it was noticed."""
        self.orphans: set[int] = set()
        """Ranks that live on though the launcher that started them is gone."""
        self.is_over = False
        """Whether `stop` was called."""

    @property
    def processes(self) -> list[int]:
        """The process numbers of the ranks that live."""
        return [process.pid for process in self._living.values()]

    def pid(self, rank: int) -> int | None:
        """Returns the process number of a rank that was seen, whether it lives or not."""
        return self._seen.get(rank)

    def poll(self) -> None:
        """Looks at every rank."""
        if self.is_over:
            return
        now = time.time()
        if len(self._seen) < self._num_ranks and now >= self._next_scan:
            self._next_scan = now + _SCAN_S
            for rank, process in self._family.ranks().items():
                if rank not in self._seen:
                    self._seen[rank] = process.pid
                    self._living[rank] = process
                    with contextlib.suppress(OSError):  # a kernel before 5.3, or a rank that has ended already
                        self._handles[rank] = os.pidfd_open(process.pid)
        for rank, process in list(self._living.items()):
            current = look(process.pid)
            if current is None or current.start != process.start:
                self.deaths[rank] = Death(rank=rank, code=None, at=now)
            elif current.state not in "ZX":
                if current.parent != process.parent:
                    self.orphans.add(rank)
                continue
            elif current.exit_code != 0:
                self.deaths[rank] = Death(rank=rank, code=current.exit_code, at=now)
            else:
                self.ended[rank] = now
            del self._living[rank]
            self._release(rank)

    def wait(self, seconds: float) -> None:
        """Sleeps, but looks at once when a rank ends: within a second the launcher collects it and ends the others."""
        if self.is_over or not self._handles:
            time.sleep(seconds)
            return
        poller = select.poll()
        for handle in self._handles.values():
            poller.register(handle, select.POLLIN)
        if poller.poll(seconds * 1000):
            self.poll()

    def stop(self) -> None:
        """Stops watching: from here on dstrain ends the ranks itself, and their deaths are its own doing."""
        self.is_over = True
        for rank in list(self._handles):
            self._release(rank)

    def _release(self, rank: int) -> None:
        handle = self._handles.pop(rank, None)
        if handle is not None:
            os.close(handle)

    def clear(self, finished: set[int]) -> None:
        """Takes back deaths of processes that the launcher says ended well."""
        for rank, pid in self._seen.items():
            if pid in finished and rank in self.deaths and self.deaths[rank].code is None:
                self.ended[rank] = self.deaths.pop(rank).at
