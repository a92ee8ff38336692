"""`run --sync`: copies the run directory, dstrain and the checkpoint by rsync to nodes without a shared file system.

rsync runs over ssh, or over srun inside a SLURM allocation. Nothing else is copied: Python with its packages, the model
and the data must be there, under the same paths.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dstrain import child_process
from dstrain.errors import Conflict, DstrainError, EnvironmentProblem, not_installed
from dstrain.launch import remote
from dstrain.launch.environment import checkout
from dstrain.launch.launch import Launch
from dstrain.launch.nodes.connection import Node
from dstrain.launch.nodes.members import Unreachable
from dstrain.launch.prepare.resume import find
from dstrain.paths import flush, write_atomic
from dstrain.rundir import COMPLETE, PART, RunDir, is_whole, mark_whole, needed, read_record, rotate
from dstrain.units import format_seconds

TRACKED = ("swanlog", "tensorboard", "wandb", ".dstrain-run.json")
"""Files of trackers in the run directory of rank 0; the last one names SwanLab's run, for a resumed run."""
_CODE = ("dstrain", "ds_templates", "launch", "hostfiles")
"""The folders of a checkout that contain dstrain."""
_MOST_DISKS = 8
"""Disks that are copied to or from at once: a checkpoint saturates this machine's link."""
_NOT_REACHED = 255
"""Exit code of ssh without a connection, which rsync passes on."""
_OPTIONS = "-rptsq"
"""With modes and times, by which files that are there already are known; `s` leaves no name to a shell of the host."""
_CLAIM = """\
command -v rsync >/dev/null || { echo "rsync is not installed there: apt-get install rsync" >&2; exit 1; }
mkdir -p "$1" && cd "$1" || exit 1
[ "$(cat .token 2>/dev/null)" != "$2" ] || { echo here; exit; }
whole=$(ls -d checkpoint-*/complete.json 2>/dev/null) && { echo whole $whole; exit; }
find . -maxdepth 1 -name '.synced*' ! -name ".synced.$2" -delete
ln -s "$2 $3" ".synced.$2" 2>/dev/null
readlink ".synced.$2" >.synced && set -- $(readlink ".synced.$2") && echo apart "$2"
"""
"""Claims a disk for the first of its nodes, with run directory, mark of the start and number of the node: a link is
made by one of them alone."""

Place = TypeVar("Place")
Found = TypeVar("Found")


class CopyFailed(EnvironmentProblem):
    """A copy to or from a host failed."""

    def __init__(self, host: str, said: str, *, is_lost: bool) -> None:
        """`said` is the reason; `is_lost` if the host could not be reached."""
        super().__init__(f"{host}: {said}")
        self.host, self.said, self.is_lost = host, said, is_lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk of other nodes, with a run directory of their own."""

    host: str
    """The first of these nodes."""
    ranks: frozenset[int]


class Copies:
    """The copies in progress. Raises CopyFailed for those that fail."""

    def __init__(self, *, by_srun: bool) -> None:
        """Reaches hosts by srun or ssh."""
        self._by_srun = by_srun
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.is_over = False
        """Whether `close` was called."""

    def sh(self, host: str, script: str, *words: str) -> str:
        """Returns the output of a shell script on a host."""
        return self._run(host, remote.on_host(host, ["sh", "-uc", script, "sh", *words], by_srun=self._by_srun))

    def send(self, host: str, source: Path, target: Path, *options: str, names: Collection[str] | None = None) -> None:
        """Copies a file, or the named ones of a folder, to a host; links as what they lead to."""
        chosen = [] if names is None else ["--files-from=-"]
        self._rsync(host, ["-L", *chosen, *options, str(source), f"{_address(host)}:{target}"], names or ())

    def fetch(self, host: str, folder: Path, *options: str, names: Collection[str] | None = None) -> None:
        """Copies files below a folder of a host, all or the named ones that exist, to the same place here; no links."""
        chosen = [] if names is None else ["--files-from=-", "--ignore-missing-args"]
        self._rsync(host, [*chosen, *options, f"{_address(host)}:{folder}/", f"{folder}/"], names or ())

    def _rsync(self, host: str, words: Sequence[str], names: Collection[str]) -> None:
        shell = shlex.join(remote.shell(by_srun=self._by_srun))
        self._run(host, ["rsync", _OPTIONS, "-e", shell, *words], "\n".join(names))

    def _run(self, host: str, line: Sequence[str], text: str = "") -> str:
        with self._lock:
            if self.is_over:
                raise CopyFailed("here", "ended", is_lost=False)
            process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            out, errors = process.communicate(text.encode("utf-8", errors="surrogateescape"))
        finally:
            with self._lock:
                self._running.discard(process)
            child_process.end(process)
        if process.returncode:
            said = remote.refusal(process.returncode, errors.decode(errors="replace")).text
            raise CopyFailed(host, said, is_lost=process.returncode == _NOT_REACHED or process.returncode < 0)
        return out.decode(errors="replace")

    def close(self) -> None:
        """Ends all copies; no more can be started."""
        with self._lock:
            self.is_over = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _address(host: str) -> str:
    """Returns a host as rsync takes it: an IPv6 address in brackets."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name else host


def push(
    nodes: Sequence[Node], run_dir: RunDir, mark: str, copies: Copies, tell: Callable[[str], None]
) -> tuple[Disk, ...]:
    """Copies what a start needs to every node that does not see this machine's run directory; returns their disks.

    Raises EnvironmentProblem with host and reason if that fails, Unreachable for hosts that do not answer, and Conflict
    if a disk holds complete checkpoints, of a run that was started from there.
    """
    if shutil.which("rsync") is None:
        raise not_installed("--sync needs", "rsync", install="apt-get install rsync")
    write_atomic(run_dir.token, mark)
    shutil.rmtree(run_dir.code, ignore_errors=True)  # left if this machine was a node of another one's run

    def claim(node: Node) -> tuple[Node, list[str]]:
        said = copies.sh(node.host, _CLAIM, str(run_dir.path), mark, str(node.number)).split()
        return node, said or ["here"]

    answers = at_once(claim, [node for node in nodes if not node.is_here], copies)
    if whole := [(node.host, said[1:]) for node, said in answers if said[0] == "whole"]:
        rows = [f"{host}: {run_dir.path} holds {', '.join(map(os.path.dirname, names))}" for host, names in whole]
        hint = "A run that was started there wrote them. Move them, or start the run there."
        raise Conflict("\n".join(rows), hint=hint)
    apart = {node: said[1] for node, said in answers if said[0] == "apart"}
    groups = [[node for node in apart if apart[node] == number] for number in dict.fromkeys(apart.values())]
    disks = [
        Disk(host=group[0].host, ranks=frozenset(rank for node in group for rank in node.ranks)) for group in groups
    ]
    at_once(lambda disk: _send_start(run_dir, disk, copies), disks, copies)
    if apart:
        what = "the run directory and dstrain" if checkout() else "the run directory"
        tell(f"copied {what} to {', '.join(node.host for node in apart)}")
    return tuple(disks)


def _send_start(run_dir: RunDir, disk: Disk, copies: Copies) -> None:
    """Copies what launchers and ranks read, with the metrics so far, which they extend; removes there what is not
    here."""
    paths = (
        *(run_dir.request, run_dir.facts, run_dir.plan, run_dir.ds_config, run_dir.hostfile, run_dir.environment),
        *(run_dir.secrets, run_dir.start_script, run_dir.edits),
        *(run_dir.metrics, run_dir.health, run_dir.samples, *(run_dir.path / name for name in TRACKED)),
    )
    names = [path.name for path in paths if path.exists()]
    gone = (run_dir.summary, run_dir.states, run_dir.plan, run_dir.edits, run_dir.unusable, run_dir.code)
    copies.sh(disk.host, 'cd "$1" && shift && rm -rf -- "$@"', str(run_dir.path), *(path.name for path in gone))
    copies.send(disk.host, run_dir.path, run_dir.path, "-r", names=names)
    if (root := checkout()) is not None:
        copies.send(disk.host, root, run_dir.code, "-r", "--exclude=__pycache__", names=_CODE)


def at_once(do: Callable[[Place], Found], places: Sequence[Place], copies: Copies) -> list[Found]:
    """Returns the result of each place. Raises one error for all places that failed."""

    def attempt(place: Place) -> Found | CopyFailed:
        try:
            return do(place)
        except CopyFailed as error:
            return error

    with ThreadPoolExecutor(max_workers=_MOST_DISKS) as pool:
        futures = [pool.submit(attempt, place) for place in places]
        try:
            results = [future.result() for future in futures]
        except BaseException:
            copies.close()
            raise
    failures = [result for result in results if isinstance(result, CopyFailed)]
    if failures and all(failure.is_lost for failure in failures):
        raise Unreachable({failure.host: failure.said for failure in failures})
    if failures:
        raise EnvironmentProblem("\n".join(failure.problem for failure in failures))
    return [result for result in results if not isinstance(result, CopyFailed)]


_PREPARE = """\
[ ! -e "$1/complete.json" ] || { echo whole; exit; }
[ -n "$2" ] && grep -q "\\"start\\": *\\"$2\\"" "$1/part.json" 2>/dev/null || rm -rf "$1"
mkdir -p "$1"
"""
"""Makes room for a checkpoint of a start (empty: unknown); files of another start are not the same, whatever their
names."""


def push_checkpoint(
    folder: Path,
    run_dir: RunDir,
    disks: Sequence[Disk],
    copies: Copies,
    tell: Callable[[str], None],
    *,
    num_ranks: int,
) -> None:
    """Copies a complete checkpoint to other disks, without files that are there or that none of their ranks reads.

    Raises EnvironmentProblem with host and reason if that fails.
    """
    record = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    start = str(record.get("start", "")) if folder.parent == run_dir.path else ""  # elsewhere it may be of another run
    files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]

    def put(disk: Disk) -> None:
        if copies.sh(disk.host, _PREPARE, str(folder), start).strip() == "whole":
            return
        wanted = needed(files, disk.ranks, written_by=record["world_size"], num_ranks=num_ranks)
        copies.send(disk.host, folder, folder, "--size-only", names=[name for name in wanted if name != COMPLETE])
        copies.send(disk.host, folder / COMPLETE, folder / PART)

    began = time.monotonic()
    at_once(put, disks, copies)
    hosts = ", ".join(disk.host for disk in disks)
    tell(f"{folder.name} is on {hosts}: copied in {format_seconds(time.monotonic() - began)}")


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
        """`disks` belong to other nodes; `limit` is how many whole checkpoints stay, None for all."""
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
