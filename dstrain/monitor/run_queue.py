"""Reads how long the main thread of this process waited for a CPU."""

from __future__ import annotations

import os
from contextlib import suppress


class RunQueue:
    """How long this process's main thread was ready to run while other processes had its CPU."""

    def __init__(self) -> None:
        """Opens the kernel's counter, where there is one. Source: Linux, Documentation/scheduler/sched-stats.rst."""
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/schedstat", os.O_RDONLY)

    def __del__(self) -> None:
        """Closes the counter."""
        if self._file is not None:
            os.close(self._file)

    def wait_s(self) -> float:
        """Returns the seconds since the process began; 0 if they are not known. It takes a microsecond."""
        if self._file is None:
            return 0.0
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        return 0.0
