"""Records which checkpoints are complete, on one disk or several, and chooses the one to resume from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dstrain.choices import Attention, Optimizer
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.heartbeat import MARK
from dstrain.job.model_changes import RopeScaling
from dstrain.paths import write_atomic
from dstrain.rundir import COMPLETE, PART, UNIVERSAL, RunDir, damage, is_whole, lacks_states, mark_whole, read_record
from dstrain.train.rank import of_all_ranks
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The checkpoint that a run resumes from."""

    checkpoint: Path
    step: int
    world_size: int
    """Number of ranks that wrote it."""
    data: str | None
    """Digest of its training data; None in checkpoints of earlier versions."""

    def event(self, ranks: int) -> dict[str, Any]:
        """Returns the line of `metrics.jsonl` with which a number of ranks resumes from it."""
        return {"event": "resume", "from_step": self.step, "ranks": ranks, "from_ranks": self.world_size}


def choose(run_dir: RunDir, wanted: str, *, world_size: int, is_apart: bool = False) -> Resume | None:
    """Returns the checkpoint to resume from, or None to start from the base model.

    `wanted` is the job's `resume`: `never`, `auto`, or a folder. Raises InvalidConfig for a folder that is not a
    complete checkpoint or has the weights alone, and for shards of another number of ranks without a universal copy,
    which DeepSpeed cannot load. With `is_apart`, the disk holds only the part of a checkpoint that its ranks read.
    """
    if wanted == "never":
        return None
    if wanted == "auto":
        newest = run_dir.newest_checkpoint(for_resume=True).folder
        if newest is None:
            return None
        folder = newest
    else:
        folder = Path(wanted)
        if not folder.is_dir():
            raise InvalidConfig(
                f'resume is "{wanted}": no such folder', hint="resume: auto uses the newest complete one"
            )
        # a part is no whole checkpoint: `dstrain run` checks those before it spreads them
        if not (is_apart and (folder / PART).is_file()):
            refuse_damaged(folder)
            if (problem := lacks_states(folder)) is not None:
                raise InvalidConfig(
                    f"{folder} {problem}", hint="Name it as `model` (or `adapter`), with another output_dir."
                )
    record = _record(folder)
    if reads_universal(folder, world_size=world_size) and not is_converted(folder):
        raise InvalidConfig(
            f"{folder} was written by {counted(record['world_size'], 'rank')} and must be converted for {world_size}",
            hint=f"dstrain run converts it; by hand: python -m dstrain.train.checkpoints.universal_checkpoint {folder}",
        )
    return Resume(checkpoint=folder, step=record["step"], world_size=record["world_size"], data=record.get("data"))


def _record(checkpoint: Path) -> dict[str, Any]:
    """Returns the record of a complete checkpoint, or of a part."""
    return read_record(checkpoint, COMPLETE if is_whole(checkpoint) else PART)


def reads_universal(checkpoint: Path, *, world_size: int) -> bool:
    """Returns whether this number of ranks needs a universal copy; without ZeRO every rank has all states."""
    record = _record(checkpoint)
    return bool(record["zero_stage"]) and record["world_size"] != world_size


def is_converted(checkpoint: Path) -> bool:
    """Returns whether a checkpoint has a universal copy."""
    return (checkpoint / UNIVERSAL).is_file()


def refuse_damaged(folder: Path) -> None:
    """Raises InvalidConfig for an incomplete or damaged checkpoint."""
    problem = damage(folder)
    if problem is not None:
        raise InvalidConfig(
            f"{folder} {problem}", hint="Use an older checkpoint of the same run; this one can be deleted."
        )


def begin(folder: Path) -> None:
    """Removes a checkpoint of the same step from before a resume."""
    (folder / COMPLETE).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The record of a checkpoint."""

    step: int
    world_size: int
    """Number of ranks that wrote it."""
    zero_stage: int
    micro_batch: int
    """Samples per forward of a rank."""
    grad_accum: int
    """Micro-batches per step; a resumed run keeps world_size / (sp · tp) · micro_batch · grad_accum."""
    sp: int
    """Sequence-parallel ranks, which share a micro-batch."""
    tp: int
    """Tensor-parallel ranks, which share each weight."""
    ep: int
    """Expert-parallel ranks, which share the experts of each layer."""
    optimizer: Optimizer = Optimizer.ADAMW
    """The job's, whose states are in the shards."""
    data: str
    """Digest of the training data and its order."""
    rope_scaling: RopeScaling | None = None
    """The job's, which a resumed run keeps."""
    attn: Attention | None = None
    """The attention of its ranks, which a resumed run with `attn: auto` keeps."""
    only_model: bool = False
    """Whether it has the weights alone, without optimizer and random states."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """The checksum of each file, by its path in the checkpoint, over all disks."""


def complete(folder: Path, written: Written) -> None:
    """Marks a checkpoint as complete; all nodes have flushed their files before.

    Raises EnvironmentProblem if a shard is missing.
    """
    _require_shards(folder, written, of_ranks=written.world_size)
    mark_whole(folder, asdict(written))


def complete_part(folder: Path, written: Written, *, of_ranks: int, start: str) -> None:
    """Marks the part of a checkpoint on one disk as complete.

    `start` distinguishes it from parts of an earlier start. Raises EnvironmentProblem if a shard is missing.
    """
    _require_shards(folder, written, of_ranks=of_ranks)
    write_atomic(folder / PART, json.dumps({**asdict(written), "start": start}) + "\n")


def _require_shards(folder: Path, written: Written, *, of_ranks: int) -> None:
    shards = list(folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt"))
    if written.zero_stage and not written.only_model and len(shards) < of_ranks:
        raise EnvironmentProblem(
            f"{folder} holds optimizer shards of only {len(shards)} of {of_ranks} ranks",
            hint="Set output_dir to a file system that all nodes share, or use dstrain run --sync.",
        )


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
