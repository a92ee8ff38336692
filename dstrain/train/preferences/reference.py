"""Reference log-probabilities: those of the model before training, kept in the run directory.

A second model would need its memory in every step; one pass over the data before the first step needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.paths import flush
from dstrain.rundir import RunDir
from dstrain.train.checkpoints.node_storage import Disk
from dstrain.train.rank import Rank

Array = np.ndarray[Any, Any]


def file_of(run_dir: RunDir, job: Job, data_digest: str) -> Path:
    """Returns the file of the reference log-probabilities: another one for other data, or another model."""
    folder = Path(job.model)
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder.is_dir() else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    adapter = f" {job.adapter}" if job.adapter else ""
    made_from = f"{data_digest} {job.model}{adapter} {job.precision} {job.method} {job.rope_scaling} {stamps}"
    return run_dir.path / f"reference-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.npy"


class Store:
    """One array for all ranks, memory-mapped from a file on each disk."""

    def __init__(self, file: Path, *, rank: Rank, disk: Disk, group: Any) -> None:
        """`group` is a gloo group of all ranks; None for a single one."""
        self._file = file
        self._writes = rank.index == disk.ranks[0]
        self._rank = rank
        self._group = group

    def read(self) -> Array | None:
        """Returns the array, or None if it has not been made; all ranks call it together.

        A disk that lacks the file, as that of a new node may, gets it from rank 0.
        """
        there = torch.tensor([self._file.exists()] * 2, dtype=torch.int32)
        if self._group is not None:
            everywhere = there[1:]
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self._group)
            dist.broadcast(there[:1], src=0, group=self._group)
        has_first, has_all = bool(there[0]), bool(there[1])
        if not has_first:
            return None
        if not has_all:
            held = [np.load(self._file) if self._rank.is_first else None]
            dist.broadcast_object_list(held, src=0, group=self._group)
            self.write(held[0])
        return self._mapped()

    def write(self, array: Any) -> Array:
        """Writes an array on each disk, and returns it memory-mapped; all ranks call it together, with the same one."""
        if self._writes:
            part = self._file.with_suffix(".part")
            with part.open("wb") as opened:
                np.save(opened, array)
            part.replace(self._file)
            flush(self._file)
        if self._group is not None:
            dist.barrier(group=self._group)
        return self._mapped()

    def _mapped(self) -> Array:
        mapped: Array = np.load(self._file, mmap_mode="r")
        return mapped


def missing(file: Path, checkpoint: str) -> InvalidConfig:
    """Returns the error of a run that resumes without the log-probabilities of the model before training."""
    return InvalidConfig(
        f"{checkpoint} was trained against a reference whose log-probabilities are not in {file.parent}: {file.name}",
        hint="Copy the file from the run directory of the checkpoint; with other data, start anew: resume: never",
    )


def computed(
    batches: Iterable[Mapping[str, Any]],
    log_probs_of: Callable[[Mapping[str, Any]], torch.Tensor],
    *,
    num_pairs: int,
    group: Any,
) -> Array:
    """Returns the log-probabilities of all pairs, (pairs, 2), float32; all ranks run it together.

    `batches` are those of this rank's `Share`: pair `i` of rank `r` is number `i` × ranks + `r`. `log_probs_of`
    returns those of a micro-batch, (2 × pairs,), the chosen sequences first.
    """
    parts = [log_probs_of(batch).float().cpu().view(2, -1).T for batch in batches]
    own = torch.cat(parts).contiguous()
    if group is None:
        gathered = [own]
    else:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
    whole: Array = torch.stack(gathered, dim=1).view(-1, 2)[:num_pairs].numpy()
    return whole
