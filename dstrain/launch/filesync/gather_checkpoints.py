"""Gathers checkpoints whose parts lie on the disks of several nodes, while training continues.

If the part of rank 0 is marked, all parts exist. The newest checkpoint is copied next: if that takes longer than
training from one to the next, those in between are skipped. Nodes keep the newest that is complete here, the one being
copied, and the newest of all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dstrain.errors import DstrainError, EnvironmentProblem
from dstrain.launch.filesync.sync import TRACKED, Copies, Disk, at_once, push, push_checkpoint
from dstrain.launch.launch import Launch
from dstrain.launch.prepare.resume import find
from dstrain.paths import flush
from dstrain.rundir import COMPLETE, PART, RunDir, is_whole, mark_whole, read_record, rotate
from dstrain.units import format_seconds

_LOOK_S = 0.5
_AGAIN_S = 60.0
"""Seconds after which a checkpoint that could not be copied is tried again, unless there is a newer one."""
_IS_OURS = """\
grep -q "\\"start\\": *\\"$2\\"" "$1/part.json" || { echo "$1: no part of this run's checkpoint is there" >&2; exit 1; }
"""
"""Whether the part of a checkpoint is of a start."""
_TIDY = """\
cd "$1" && before=$2 && shift 2 || exit
for folder in checkpoint-*; do
  step=${folder#checkpoint-}
  case $step in *[!0-9]*) continue ;; esac
  [ "$step" -lt "$before" ] && [ ! -e "$folder/complete.json" ] || continue
  case " $* " in *" $folder "*) ;; *) rm -rf "$folder" ;; esac
done
"""
"""Deletes parts of checkpoints before a step, but for some; whole checkpoints stay."""


@contextmanager
def distribute(launch: Launch, tell: Callable[[str], None]) -> Iterator[CheckpointGatherer | None]:
    """Copies to other nodes what a start needs, including the checkpoint; yields None if all share this file system.

    Raises EnvironmentProblem with host and reason if that fails. All transfers have ended at the end.
    """
    prepared = launch.prepared
    if not launch.syncs or prepared.is_local:
        yield None
        return
    calls = Copies(by_srun=launch.by_srun)
    try:
        disks = push(launch.nodes, prepared.run_dir, launch.mark, calls, tell)
        saved = find(prepared.job)
        if disks and saved is not None:
            push_checkpoint(saved.folder, prepared.run_dir, disks, calls, tell, num_ranks=prepared.hosts.num_slots)
        limit = prepared.job.save_total_limit
        yield CheckpointGatherer(prepared.run_dir, launch.mark, disks, calls, tell, limit=limit) if disks else None
    finally:
        calls.close()


class CheckpointGatherer:
    """Gathers the checkpoints of one start in threads of its own; a failure is reported once and does not end the
    run."""

    def __init__(
        self,
        run_dir: RunDir,
        mark: str,
        disks: Sequence[Disk],
        calls: Copies,
        tell: Callable[[str], None],
        *,
        limit: int | None,
    ) -> None:
        """`disks` are those of other nodes; `limit` is how many whole checkpoints stay, None for all."""
        self._run_dir, self._mark, self._disks = run_dir, mark, disks
        self._calls, self._tell, self._limit = calls, tell, limit
        self._failed_at: dict[str, float] = {}
        self._told: set[str] = set()
        self._kept: set[str] = set()
        self._has_trained = False
        self._ends_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="parts", daemon=True)
        self._thread.start()

    def finish(self, tick: Callable[[], None], *, has_trained: bool) -> None:
        """Waits until the newest checkpoint, and after a finished training the model, is copied or cannot be copied.

        `tick` is called repeatedly meanwhile.
        """
        self._has_trained = has_trained
        self._ends_at = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            tick()

    def _run(self) -> None:
        copying: tuple[Path, Future[None]] | None = None
        with ThreadPoolExecutor(max_workers=1) as pool:
            while True:
                is_ending = self._ends_at is not None  # looked at first: what is written before that is still seen
                newest = self._newest()
                if copying is not None and copying[1].done():
                    copying = None
                if copying is None and newest is not None and not is_whole(newest) and self._is_due(newest):
                    copying = newest, pool.submit(self._gather, newest)
                elif copying is None and is_ending:
                    return self._fetch()
                if newest is not None:
                    self._tidy(newest, copying[0] if copying else newest)
                time.sleep(_LOOK_S)

    def _newest(self) -> Path | None:
        """Returns the newest checkpoint of this start of which all parts are written."""
        ours = [folder for _, folder in self._run_dir.checkpoints() if start_of(folder) == self._mark]
        return ours[-1] if ours else None

    def _is_due(self, folder: Path) -> bool:
        failed_at = self._failed_at.get(folder.name)
        if failed_at is None:
            return True
        return failed_at < self._ends_at if self._ends_at is not None else time.monotonic() - failed_at > _AGAIN_S

    def _gather(self, folder: Path) -> None:
        """Copies the parts of a checkpoint and marks it as whole."""
        began = time.monotonic()

        def fetch(disk: Disk) -> None:
            self._calls.sh(disk.host, _IS_OURS, str(folder), self._mark)
            self._calls.fetch(disk.host, folder, f"--exclude=/{COMPLETE}", f"--exclude=/{PART}")

        try:
            at_once(fetch, self._disks, self._calls)
            _complete(folder)
            rotate(self._run_dir, self._limit)
        except (DstrainError, OSError) as error:
            self._failed_at[folder.name] = time.monotonic()
            self._tell_once(folder.name, error)
            return
        hosts, seconds = ", ".join(disk.host for disk in self._disks), format_seconds(time.monotonic() - began)
        self._tell(f"{folder.name} is complete here: copied from {hosts} in {seconds}")

    def _tidy(self, newest: Path, copying: Path) -> None:
        """Removes all but three checkpoints from the disks."""
        whole = [folder for _, folder in self._run_dir.whole_checkpoints()][-1:]
        kept = {folder.name for folder in (newest, copying, *whole)}
        if kept == self._kept:
            return
        self._kept, before = kept, newest.name.rpartition("-")[2]

        words = (str(self._run_dir.path), before, *kept)
        subprocess.run(["sh", "-uc", _TIDY, "sh", *words], check=False)
        try:
            at_once(lambda disk: self._calls.sh(disk.host, _TIDY, *words), self._disks, self._calls)
        except DstrainError as error:
            self._tell_once("older checkpoints", error)

    def _fetch(self) -> None:
        """Copies what rank 0 writes beside its checkpoints: files of trackers, and the model."""
        names = [*TRACKED, *([self._run_dir.final.name] if self._has_trained else [])]
        if self._has_trained and any(0 in disk.ranks for disk in self._disks):
            shutil.rmtree(self._run_dir.final, ignore_errors=True)
        for disk in self._disks:
            if 0 in disk.ranks:
                try:
                    self._calls.fetch(disk.host, self._run_dir.path, "-r", names=names)
                except (DstrainError, OSError) as error:
                    self._tell_once(", ".join(names), error)

    def _tell_once(self, what: str, error: DstrainError | OSError) -> None:
        """Reports a failed copy, once for each reason."""
        problem = error.problem if isinstance(error, DstrainError) else str(error)
        if problem not in self._told and not self._calls.is_over:
            self._told.add(problem)
            self._tell(f"{what} of other nodes cannot be copied here: {problem}")


def start_of(checkpoint: Path) -> str | None:
    """Returns the mark of the start that wrote a checkpoint to several disks; None for any other one."""
    for name in (PART, COMPLETE):
        try:
            start = json.loads((checkpoint / name).read_text(encoding="utf-8")).get("start")
        except (OSError, ValueError, AttributeError):
            continue
        return str(start) if start else None
    return None


def _complete(folder: Path) -> None:
    """Marks a checkpoint as complete. Raises EnvironmentProblem if a shard is missing."""
    record = read_record(folder, PART)
    shards = list(folder.glob("global_step*/*zero_pp_rank_*_optim_states.pt"))
    if record["zero_stage"] and not record.get("only_model") and len(shards) < record["world_size"]:
        raise EnvironmentProblem(f"it has the shards of {len(shards)} of {record['world_size']} ranks")
    flush(folder)
    mark_whole(folder, record)
    (folder / PART).unlink()
