"""Determines which ranks share a disk: all of them, unless `run --sync` copied the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.heartbeat import MARK
from dstrain.rundir import RunDir
from dstrain.train.rank import of_all_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk that this rank writes to."""

    ranks: tuple[int, ...]
    """All ranks on this disk."""
    is_apart: bool = False
    """Whether the run uses several disks; `dstrain run` then gathers checkpoints from their parts."""
    start: str = ""
    """The mark of this start; parts of one checkpoint have the same."""


def start_of(environment: Mapping[str, str]) -> str:
    """Returns the mark of a start without the node's number; empty if ranks were started by hand.

    >>> start_of({"DSTRAIN_RUN_ID": "0f3c-1"}), start_of({})
    ('0f3c', '')
    """
    return environment.get(MARK, "").partition("-")[0]


def number_of(run_dir: RunDir, environment: Mapping[str, str]) -> int | None:
    """Returns the number of a disk that `run --sync` copied to in this start; None for the disk of `run`."""
    try:
        mark, number = run_dir.synced.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return int(number) if mark == start_of(environment) else None


def shared(run_dir: RunDir, environment: Mapping[str, str], group: Any) -> Disk:
    """Returns this rank's disk; collective over `group`, a gloo group of all ranks, None with one rank."""
    own = number_of(run_dir, environment)
    numbers = of_all_ranks(own, group)
    return Disk(
        ranks=tuple(index for index, number in enumerate(numbers) if number == own),
        is_apart=any(number is not None for number in numbers),
        start=start_of(environment),
    )
