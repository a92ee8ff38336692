"""Reads the kernel's log, and looks there for processes that it killed because memory ran out."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstrain.child_process import run

_READ_S = 1.5
_COMMANDS = (["dmesg"], ["journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic"])
_TIME = re.compile(r"^\s*(?:<\d+>)?\[\s*(\d+\.\d+)\]")
_KILLED = re.compile(r"[Oo]ut of memory: Killed process (\d+) .*")
"""Source: Linux 6.12 mm/oom_kill.c: __oom_kill_process"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMessages:
    """The kernel's log since boot."""

    text: str = ""
    problem: str | None = None
    """Why it cannot be read; None if it can."""


def read(environment: Mapping[str, str]) -> KernelMessages:
    """Returns the kernel's log, in lines that begin with the seconds since boot."""
    problem = "neither dmesg nor journalctl is installed"
    for command in _COMMANDS:
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            continue
        output = run(command, {**environment, "LC_ALL": "C"}, _READ_S)
        if output.code == 0 and (command[0] == "dmesg" or " kernel: " in output.out):
            return KernelMessages(text=output.out)
        problem = f"{command[0]}: {output.last_line or 'no answer'}"
    return KernelMessages(problem=problem)


def seconds_of(line: str) -> float | None:
    """Returns when a line of the kernel's log was written, in seconds since boot; None if it does not say.

    >>> seconds_of("[680111.646286] NVRM: Xid"), seconds_of("a continued line")
    (680111.646286, None)
    """
    time = _TIME.match(line)
    return float(time[1]) if time is not None else None


def uptime_s() -> float | None:
    """Returns the seconds since boot."""
    with suppress(OSError, ValueError):
        return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return None


class MemoryKills:
    """The processes of this machine that the kernel has killed since now because memory ran out."""

    def __init__(self) -> None:
        """Starts to count."""
        self._began = uptime_s()
        self._counted = _count(Path("/"))

    def verdict(self, pid: int) -> str:
        """Returns the kernel's reason for a process that SIGKILL has ended, as a clause."""
        messages = read(os.environ)
        if (line := killed(messages.text, pid=_pid_of_kernel(pid), since=self._began or 0.0)) is not None:
            return f"{OUT_OF_MEMORY} (the kernel's log: {line})"
        now = _count(Path("/"))
        if now is not None and now > (self._counted or 0):
            return f"{OUT_OF_MEMORY} (oom_kill of the memory cgroup: {now - (self._counted or 0)} since the start)"
        if messages.problem is None:
            return "the kernel's log has no process that it killed because memory ran out, so somebody else sent it"
        counted = "" if now is None else ", but the memory cgroup counts no such process"
        return f"the kernel's log cannot be read ({messages.problem}){counted}, and no other log says why"


OUT_OF_MEMORY = "the kernel killed it because memory ran out"


def killed(text: str, *, pid: int | None, since: float) -> str | None:
    """Returns the last message about a process that was killed because memory ran out, without its time.

    `pid` None: a process of any number, since the kernel numbers processes of containers differently.

    >>> log = "[7.5] Memory cgroup out of memory: Killed process 815 (python) total-vm:9kB, anon-rss:8kB"
    >>> killed(log, pid=815, since=7.0), killed(log, pid=814, since=7.0), killed(log, pid=None, since=8.0)
    ('Memory cgroup out of memory: Killed process 815 (python) total-vm:9kB, anon-rss:8kB', None, None)
    """
    for line in reversed(text.splitlines()):
        found, at = _KILLED.search(line), seconds_of(line)
        if found is not None and (at or since) >= since and pid in {None, int(found[1])}:
            return line.partition("]")[2].strip() or found[0]
    return None


def _pid_of_kernel(pid: int) -> int | None:
    """Returns the number that the kernel's log gives a process; None inside a container, which has its own numbers."""
    with suppress(OSError):
        return pid if str(Path("/proc/self/ns/pid").readlink()) == f"pid:[{_FIRST_PID_NAMESPACE}]" else None
    return None


_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Source: Linux 6.12 include/linux/proc_ns.h: PROC_PID_INIT_INO"""


def _count(root: Path) -> int | None:
    """Returns how many processes of this one's memory cgroup the kernel has killed; None if it does not count them."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mounts = ["sys/fs/cgroup/memory"] if controllers else ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
            name = "memory.oom_control" if controllers else "memory.events"
            for folder in (place for mount in mounts for place in (root / mount / group.strip("/"), root / mount)):
                with suppress(OSError):
                    counts = dict(row.split() for row in (folder / name).read_text(encoding="ascii").splitlines())
                    if "oom_kill" in counts:
                        return int(counts["oom_kill"])
    return None
