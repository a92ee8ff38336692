"""Which checkpoints are whole, which one a run goes on from, and which ones go."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.paths import write_atomic
from dstrain.rundir import COMPLETE, RunDir, is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on."""

    checkpoint: Path
    """The whole checkpoint."""
    step: int
    """Its step."""


def choose(run_dir: RunDir, wanted: str, *, world_size: int) -> Resume | None:
    """Returns the checkpoint to go on from, or None to begin.

    `wanted` is the job's `resume`: `never`, `auto`, or a folder. Raises InvalidConfig for a folder that is not a whole
    checkpoint or was written by another number of ranks: DeepSpeed can load its own shards only.
    """
    if wanted == "never":
        return None
    if wanted == "auto":
        whole = [folder for _, folder in run_dir.checkpoints() if is_whole(folder)]
        if not whole:
            return None
        folder = whole[-1]
    else:
        folder = Path(wanted)
        if not folder.is_dir():
            raise InvalidConfig(f'resume is "{wanted}": no such folder', hint="resume: auto takes the newest whole one")
        refuse_half_written(folder)
    record = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    if record["world_size"] != world_size:
        raise InvalidConfig(
            f"{folder} was written by {record['world_size']} ranks and cannot be loaded by {world_size}",
            hint=f"Run on {record['world_size']} GPUs, or begin from its weights: "
            f"python -m dstrain.train.export {folder} WEIGHTS, then model: WEIGHTS",
        )
    return Resume(checkpoint=folder, step=int(record["step"]))


def half_written(run_dir: RunDir) -> list[Path]:
    """Returns the checkpoints that were not written to their end, oldest first."""
    return [folder for _, folder in run_dir.checkpoints() if not is_whole(folder)]


def refuse_half_written(folder: Path) -> None:
    """Raises InvalidConfig for a checkpoint that was not written to its end."""
    if not is_whole(folder):
        raise InvalidConfig(
            f"{folder} has no {COMPLETE}: it was not written to its end",
            hint="Take an older checkpoint of the same run; this one can be deleted.",
        )


def begin(folder: Path) -> None:
    """Removes what an earlier, superseded part of the run left where a checkpoint is about to be written."""
    (folder / COMPLETE).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def complete(folder: Path, *, step: int, world_size: int, zero_stage: int) -> None:
    """Marks a checkpoint as whole; the last thing that is written. Raises EnvironmentProblem if a shard is missing."""
    shards = list(folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt"))
    if zero_stage and len(shards) < world_size:
        raise EnvironmentProblem(
            f"{folder} holds the optimizer shards of {len(shards)} of {world_size} ranks",
            hint="Is output_dir on a file system that all nodes share?",
        )
    write_atomic(
        folder / COMPLETE,
        json.dumps({"step": step, "world_size": world_size, "zero_stage": zero_stage}) + "\n",
    )


def rotate(run_dir: RunDir, limit: int | None) -> list[Path]:
    """Deletes the oldest checkpoints down to `limit` whole ones, and half-written ones older than the newest whole one.

    The newest whole one always stays. Returns what was deleted.
    """
    every = run_dir.checkpoints()
    whole = [folder for _, folder in every if is_whole(folder)]
    if limit is None or not whole:
        return []
    kept = set(whole[-max(limit, 1) :])
    newest = int(whole[-1].name.removeprefix("checkpoint-"))
    gone = [folder for step, folder in every if folder not in kept and step < newest]
    for folder in gone:
        (folder / COMPLETE).unlink(missing_ok=True)  # a deletion that is cut short must not leave a "whole" one
        shutil.rmtree(folder, ignore_errors=True)
    return gone
