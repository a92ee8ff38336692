"""Removes the shared memory that DeepSpeed's CPU collectives leave behind.

DeepSpeed never unlinks its buffers, which take 66 MiB of RAM for each rank of every run, and names them after the port
of rank 0: a rank of a later run with that port would take an old one for its neighbour's. A rank that opens its
neighbours' buffers tries forever, so those of a run that is starting must stay.
Source: deepspeed 0.19.8 ops/csrc/cpu/comm/shm.cpp: shm_initialize.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dstrain.open_files import open_files

_FOLDER = Path("/dev/shm")
_STARTED_S = 10.0
"""Age of a buffer at which all ranks of its run have opened it: they do so right after they met."""


def remove_buffers(master_port: int | None = None, folder: Path = _FOLDER) -> None:
    """Removes this user's buffers that no process holds: those of the port, and those of earlier runs.

    A buffer that looks unused may belong to a process of another container, unless it has the port: it stays until
    that run has started.
    """
    held = set(open_files())
    for buffer in _buffers(folder):
        if buffer not in held and (_is_of(buffer, master_port) or _age_s(buffer) > _STARTED_S):
            buffer.unlink(missing_ok=True)


def claim_buffers(master_port: int, folder: Path = _FOLDER, wait: Callable[[float], None] = time.sleep) -> None:
    """Removes every buffer of the port, once the ranks of a run elsewhere that holds it have opened them.

    Two runs share a port where they have networks of their own and one `/dev/shm`: containers with `--ipc=host`.
    """
    remove_buffers(master_port, folder)
    for buffer in _buffers(folder):
        while _is_of(buffer, master_port) and 0 <= _age_s(buffer) < _STARTED_S and buffer in open_files():
            wait(0.2)
        if _is_of(buffer, master_port):
            buffer.unlink(missing_ok=True)


def _buffers(folder: Path) -> list[Path]:
    return list(folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))


def _is_of(buffer: Path, port: int | None) -> bool:
    return buffer.name.split("_")[-2] == str(port)


def _age_s(buffer: Path) -> float:
    """Returns the seconds since the buffer was made; a negative number if it is gone."""
    with suppress(OSError):
        return max(time.time() - buffer.stat().st_ctime, 0.0)
    return -1.0
