"""Reads counters of this process and its machine: memory, clocks, power, waiting for a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import psutil
import torch

_NAN = float("nan")


class RunQueue:
    """How long this process's main thread was ready to run while other processes had its CPU."""

    def __init__(self) -> None:
        """Opens the kernel's counter, if it exists. Source: Linux, Documentation/scheduler/sched-stats.rst."""
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


def used_bytes() -> float:
    """Returns the bytes of this GPU that are in use, by all processes; asking does not wait for its kernels."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def nvml(read: Callable[[], float]) -> float:
    """Returns NVML's figures; NaN without a GPU, or without an answer."""
    if torch.cuda.is_available():
        with suppress(Exception):  # NVML has many errors, and none matters to training
            return float(read())
    return _NAN


@cache
def power_limit_w() -> float:
    """Returns the enforced power limit of this GPU in watts; NaN if it is not known."""

    def read() -> float:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000

    return nvml(read)


def resident_bytes() -> float:
    """Returns the resident memory of this process; NaN if it is not known."""
    with suppress(psutil.Error, OSError):
        return float(psutil.Process().memory_info().rss)
    return _NAN


def ram_bytes() -> int:
    """Returns the RAM of this machine, of which `used_share` is a share; a container's limit may be lower."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def used_share() -> float:
    """Returns the share of this machine's RAM that no process could have."""
    with suppress(psutil.Error, OSError):
        memory = psutil.virtual_memory()
        return 1 - memory.available / memory.total
    return _NAN
