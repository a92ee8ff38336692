"""Probes process limits, RAM and disks."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from dstrain.doctor.facts import Folder, Limits, Question, Space
from dstrain.facts.probe import host_memory_bytes
from dstrain.launch.prepare.preflight import existing

_SHM = Path("/dev/shm")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")


def look_limits(question: Question, environment: Mapping[str, str]) -> Limits:
    """Returns shared memory, locked memory and open files."""
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        memlock_bytes=_limited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        open_files=_limited(soft),
        open_files_hard=_limited(hard),
        is_container=any(Path(mark).exists() for mark in _CONTAINER_MARKS),
    )


def _limited(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def look_space(question: Question, environment: Mapping[str, str]) -> Space:
    """Returns RAM, and the free space of the folders that the run writes."""
    ram = host_memory_bytes()
    return Space(
        ram_bytes=ram,
        available_bytes=min(ram, psutil.virtual_memory().available),
        folders={purpose: folder(Path(name)) for purpose, name in question.folders.items()},
        unreadable=tuple(path for path in question.paths if not os.access(path, os.R_OK)),
    )


def folder(path: Path) -> Folder:
    """Returns a folder, or its nearest parent that is there, with what is free."""
    there = existing(path.expanduser())
    free = shutil.disk_usage(there).free
    return Folder(path=str(path.expanduser()), free_bytes=free, is_writable=os.access(there, os.W_OK))
