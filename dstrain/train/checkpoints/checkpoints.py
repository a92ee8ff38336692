"""Records which checkpoints are complete, chooses the one to resume from, and verifies its files on each node."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import xxhash

from dstrain.choices import Attention, Optimizer
from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig, type_and_line
from dstrain.heartbeat import MARK, NO_VERIFY, Phase, Sender
from dstrain.job.model_changes import RopeScaling
from dstrain.paths import write_atomic
from dstrain.rundir import (
    COMPLETE,
    PART,
    UNIVERSAL,
    UNIVERSAL_SUMS,
    RunDir,
    damage,
    for_other_programs,
    is_whole,
    lacks_states,
    mark_whole,
    needed,
    note_unusable,
    put_aside,
    read_record,
    shard_numbers,
)
from dstrain.train.rank import Rank, of_all_ranks
from dstrain.units import MIB, counted, format_bytes


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


_LOADING = frozenset(
    {
        *("DeepSpeedEngine.load_checkpoint", "deepspeed_load_checkpoint", "Trainer._load_optimizer_and_scheduler"),
        *(
            "Trainer._load_rng_state",
            "TrainerState.load_from_json",
            "StreamProgress.restore",
            "Trainer._load_callback_state",
        ),
    }
)
"""Functions that read a checkpoint. Source: transformers 5.23 trainer.py, deepspeed 0.19.8 runtime/engine.py."""
_OTHER_RANKS = ("/torch/distributed/", "/deepspeed/comm/")
"""Folders of code that fails because another rank has failed."""


def recorded(checkpoint: Path, *, universal: bool = False) -> dict[str, str]:
    """Returns the checksum of each file by its name, including the universal copy if it is read.

    A checkpoint of an earlier version has none.
    """
    record = read_record(checkpoint, COMPLETE if (checkpoint / COMPLETE).exists() else PART)
    checksums: dict[str, str] = record.get("checksums", {})
    if universal and checksums:
        with suppress(FileNotFoundError):  # an earlier version converted it
            checksums = checksums | json.loads((checkpoint / UNIVERSAL_SUMS).read_text(encoding="utf-8"))
    return checksums


def content_damage(
    checkpoint: Path, checksums: Mapping[str, str], report: Callable[[int], None] = lambda count: None
) -> str | None:
    """Returns why files of a checkpoint are not those that were saved; None if they are."""
    for name, wanted in checksums.items():
        try:
            found = checksum(checkpoint / name, report)
        except OSError as error:
            return f"is damaged ({name}: {error.strerror})"
        if found != wanted:
            return f"is damaged ({name} has another checksum than when it was saved)"
    return None


def refuse_altered(checkpoint: Path) -> None:
    """Raises InvalidConfig for a checkpoint of which any file is not as it was saved, and notes it for `run`."""
    problem = content_damage(checkpoint, recorded(checkpoint))
    if problem is not None:
        run_dir = RunDir(checkpoint.parent)
        if run_dir.request.exists():
            note_unusable(run_dir, checkpoint, problem)
        raise InvalidConfig(f"{checkpoint} {problem}", hint="Use an older checkpoint of the same run.")


class Verification:
    """The verification of the checkpoint that a run resumes from, on one rank."""

    def __init__(self, resume: Resume, run_dir: RunDir, rank: Rank, environment: Mapping[str, str]) -> None:
        """Reads the record."""
        self._folder = resume.checkpoint
        self._run_dir = run_dir
        self._rank = rank
        self._is_wanted = NO_VERIFY not in environment
        self._is_supervised = bool(start_of(environment))
        self._checksums = recorded(self._folder, universal=reads_universal(self._folder, world_size=rank.world_size))
        self._own = _share(self._checksums, self._folder, resume, rank, environment) if self._is_wanted else {}

    def run(self, heartbeat: Sender) -> None:
        """Raises InvalidConfig if a file that this rank verifies is not as it was saved, and notes it for `run`."""
        name = self._folder.name
        if not self._is_wanted:
            return self._rank.say(f"note: --no-verify: the files of {name} are not compared with their checksums")
        if not self._checksums:
            return self._rank.say(f"note: {name} has no checksums, as an earlier dstrain wrote it: it is not verified")
        total = sum((self._folder / file).stat().st_size for file in self._own if (self._folder / file).exists())
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            heartbeat.count(Phase.VERIFYING, done // MIB, total // MIB)

        problem = content_damage(self._folder, self._own, report)
        if problem is not None:
            self._give_up(problem)
            hint = "Use an older checkpoint; `dstrain run --no-verify` loads this one all the same."
            raise InvalidConfig(f"{self._folder} {problem}", hint=hint)
        self._rank.say(f"verified {name}: {counted(len(self._own), 'file')} of rank 0 ({format_bytes(total)}) as saved")
        return None

    def note_failed_load(self, error: BaseException) -> None:
        """Notes a checkpoint that fails to load, unless its files are known to be those that were saved.

        Then the job or its packages are the cause, and older checkpoints would fail alike.
        """
        is_known = bool(self._checksums) and self._is_wanted
        if not is_known and _fails_to_load(error):
            self._give_up(f"cannot be loaded ({type_and_line(error)})")

    def _give_up(self, why: str) -> None:
        note_unusable(self._run_dir, self._folder, why)
        if not self._is_supervised and self._folder.parent == self._run_dir.path:
            with suppress(OSError):  # another rank was faster
                print(f"{self._folder.name} {why}: put aside as {put_aside(self._folder).name}", file=sys.stderr)


def _share(
    checksums: Mapping[str, str], folder: Path, resume: Resume, rank: Rank, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the files that a rank verifies: its own shards, and a part of those that all ranks of its node read.

    Weights that no rank reads are dealt out to all ranks, if the checkpoint is whole.
    """
    read = needed(checksums, {rank.index}, written_by=resume.world_size, num_ranks=rank.world_size)
    numbers = shard_numbers(checksums, resume.world_size) if resume.world_size == rank.world_size else {}
    own = [name for name in read if name in numbers]
    local_size = max(
        rank.local_index + 1, int(environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or 1)
    )
    common = sorted((name for name in read if name not in numbers), key=lambda name: (-_size(folder / name), name))
    others = [name for name in sorted(checksums) if for_other_programs(name)] if (folder / COMPLETE).exists() else []
    mine = [*own, *common[rank.local_index :: local_size], *others[rank.index :: rank.world_size]]
    return {name: checksums[name] for name in mine}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fails_to_load(error: BaseException) -> bool:
    """Returns whether an error arose while a checkpoint was read, and not because of memory or another rank."""
    frames = list(_frames(error.__traceback__))
    names = [name for name, _ in frames]
    begin = next((at for at, name in enumerate(names) if name in _LOADING), None)
    if begin is None or isinstance(error, MemoryError | DstrainError) or "OutOfMemory" in type(error).__name__:
        return False
    return not any(part in file for _, file in frames[begin:] for part in _OTHER_RANKS)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, str]]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield code.co_qualname, code.co_filename
        traceback = traceback.tb_next


_BLOCK = 2**22


def checksum(path: Path, report: Callable[[int], None] = lambda count: None) -> str:
    """Returns the checksum of a file; `report` gets the bytes of each block. Raises OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        return of_next(file, None, report=report)


def of_next(file: Any, count: int | None, *also: Any, report: Callable[[int], None] = lambda count: None) -> str:
    """Returns the checksum of the next `count` bytes of a file (None: all); the digests `also` get them too."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK if count is None else max(1, min(_BLOCK, count))))
    while count is None or count > 0:
        read = file.readinto(block[:count])
        if not read:
            break
        for each in (digest, *also):
            each.update(block[:read])
        report(read)
        count = None if count is None else count - read
    return digest.hexdigest()


class HashingFile:
    """A file that is written once, from its beginning to its end, and its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        """Writes to `file`."""
        self._file = file
        self._digest = xxhash.xxh3_128()

    @property
    def checksum(self) -> str:
        """The checksum of all that was written."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:
        """Writes bytes, and returns their number."""
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flushes Python's buffer."""
        self._file.flush()
