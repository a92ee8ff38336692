"""Records which checkpoints are complete, and chooses the one to resume from."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.paths import write_atomic
from dstrain.rundir import COMPLETE, PART, UNIVERSAL, RunDir, damage, is_whole, mark_whole, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on."""

    checkpoint: Path
    """The whole checkpoint."""
    step: int
    data: str | None
    """Digest of the data it was trained on; None if an earlier version wrote it."""


def choose(run_dir: RunDir, wanted: str, *, world_size: int, is_apart: bool = False) -> Resume | None:
    """Returns the checkpoint to go on from, or None to begin.

    `wanted` is the job's `resume`: `never`, `auto`, or a folder. Raises InvalidConfig for a folder that is not a whole
    checkpoint, and for shards of another number of ranks without a universal copy: DeepSpeed can load its own only.
    `is_apart` is for a disk that `run` copied to what its ranks read of a whole one.
    """
    if wanted == "never":
        return None
    if wanted == "auto":
        newest = run_dir.newest_checkpoint().folder
        if newest is None:
            return None
        folder = newest
    else:
        folder = Path(wanted)
        if not folder.is_dir():
            raise InvalidConfig(f'resume is "{wanted}": no such folder', hint="resume: auto takes the newest whole one")
        if not (is_apart and (folder / PART).is_file()):
            refuse_damaged(folder)
    record = _record(folder)
    if reads_universal(folder, world_size=world_size) and not is_converted(folder):
        raise InvalidConfig(
            f"{folder} was written by {record['world_size']} ranks and cannot be loaded by {world_size} as it is",
            hint=f"dstrain run converts it; by hand: python -m dstrain.train.checkpoints.universal_checkpoint {folder}",
        )
    return Resume(checkpoint=folder, step=record["step"], data=record.get("data"))


def _record(checkpoint: Path) -> dict[str, Any]:
    """Returns what a whole checkpoint, or a part of one, says of itself."""
    return read_record(checkpoint, COMPLETE if is_whole(checkpoint) else PART)


def reads_universal(checkpoint: Path, *, world_size: int) -> bool:
    """Returns whether so many ranks need a checkpoint's universal copy; without ZeRO every rank's states are whole."""
    record = _record(checkpoint)
    return bool(record["zero_stage"]) and record["world_size"] != world_size


def is_converted(checkpoint: Path) -> bool:
    """Returns whether a checkpoint has a universal copy; the file that names it is written last."""
    return (checkpoint / UNIVERSAL).is_file()


def refuse_damaged(folder: Path) -> None:
    """Raises InvalidConfig for a checkpoint that was not written to its end, or has lost bytes since."""
    problem = damage(folder)
    if problem is not None:
        raise InvalidConfig(
            f"{folder} {problem}", hint="Take an older checkpoint of the same run; this one can be deleted."
        )


def begin(folder: Path) -> None:
    """Removes what an earlier, superseded part of the run left where a checkpoint is about to be written."""
    (folder / COMPLETE).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a checkpoint was trained, as it says itself."""

    step: int
    world_size: int
    """The ranks that wrote it."""
    zero_stage: int
    """The ZeRO stage of its shards."""
    micro_batch: int
    """Samples in one forward of one rank."""
    grad_accum: int
    """Micro-batches per step; times the two above, the samples of a step, which a run that goes on keeps."""
    data: str
    """Digest of the training data and their order."""


def complete(folder: Path, written: Written) -> None:
    """Marks a checkpoint as whole, with the size of each file; every node has flushed its files before.

    Raises EnvironmentProblem if a shard is missing.
    """
    _require_shards(folder, written, of_ranks=written.world_size)
    mark_whole(folder, asdict(written))


def complete_part(folder: Path, written: Written, *, of_ranks: int, start: str) -> None:
    """Marks as written what some ranks have of a checkpoint on their disk, the last thing that is written there.

    `start` tells its parts from those of an earlier start. Raises EnvironmentProblem if a shard is missing.
    """
    _require_shards(folder, written, of_ranks=of_ranks)
    write_atomic(folder / PART, json.dumps({**asdict(written), "start": start}) + "\n")


def _require_shards(folder: Path, written: Written, *, of_ranks: int) -> None:
    shards = list(folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt"))
    if written.zero_stage and len(shards) < of_ranks:
        raise EnvironmentProblem(
            f"{folder} holds the optimizer shards of {len(shards)} of {of_ranks} ranks",
            hint="Is output_dir on a file system that all nodes share? Without one, dstrain run --sync.",
        )
