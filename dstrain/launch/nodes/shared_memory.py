"""Removes the shared memory that DeepSpeed's CPU collectives leave behind."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def remove_buffers(master_port: int, folder: Path = Path("/dev/shm")) -> None:
    """Removes the buffers of a run on this node: 66 MiB of RAM for each rank of every run.

    A rank of a later run with the same port could take an old one for its neighbour's.
    Source: deepspeed 0.19.8 csrc/cpu/comm/shm.cpp: shm_initialize, which never unlinks its files.
    """
    for buffer in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{master_port}_*"):
        with suppress(OSError):
            buffer.unlink()
