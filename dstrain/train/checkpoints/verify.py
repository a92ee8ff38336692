"""Verifies that the files of a checkpoint are those that were saved: every file once on each node that reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from dstrain.checksums import checksum
from dstrain.errors import DstrainError, InvalidConfig, type_and_line
from dstrain.heartbeat import NO_VERIFY, Phase, Sender
from dstrain.rundir import (
    COMPLETE,
    PART,
    UNIVERSAL_SUMS,
    RunDir,
    for_other_programs,
    needed,
    note_unusable,
    put_aside,
    read_record,
    shard_numbers,
)
from dstrain.train.checkpoints.checkpoints import Resume, reads_universal, start_of
from dstrain.train.rank import Rank
from dstrain.units import MIB, counted, format_bytes

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
