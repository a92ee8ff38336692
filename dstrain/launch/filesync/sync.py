"""`run --sync`: sends the run directory, dstrain and the checkpoint to nodes without a shared file system.

Nothing else is copied: Python with its packages, the model and the data must be there, under the same paths.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.launch.environment import checkout
from dstrain.launch.filesync import remote_end
from dstrain.launch.filesync.transfers import TransferFailed, Transfers
from dstrain.launch.nodes.layout import Node
from dstrain.launch.nodes.members import Unreachable
from dstrain.paths import write_atomic
from dstrain.rundir import COMPLETE, PART, RunDir, needed
from dstrain.units import format_bytes, format_seconds

TRACKED = ("swanlog", "tensorboard", "wandb", ".dstrain-run.json")
"""Files of trackers in the run directory of rank 0; the last one names SwanLab's run, for a resumed run."""
_MOST_HOSTS = 64
_MOST_CHECKPOINTS = 8
"""Disks that are written at once: a checkpoint saturates this machine's link."""
_CODE = ("dstrain", "ds_templates", "launch", "hostfiles")
"""The folders of a checkout that contain dstrain."""
_WORTH_SAYING = 256 * 2**20
"""Bytes of a copy that is worth a message."""

Place = TypeVar("Place")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk of other nodes, with a run directory of their own."""

    host: str
    """The first of these nodes."""
    ranks: frozenset[int]


def push(
    nodes: Sequence[Node], run_dir: RunDir, mark: str, calls: Transfers, tell: Callable[[str], None]
) -> tuple[Disk, ...]:
    """Copies what a start needs to every node that does not see this machine's run directory; returns their disks.

    Raises EnvironmentProblem with host and reason if that fails, Unreachable for hosts that do not answer, and Conflict
    if a disk holds complete checkpoints: those of a run that was started from there.
    """
    write_atomic(run_dir.token, mark)
    shutil.rmtree(run_dir.code, ignore_errors=True)  # left if this machine was a node of another one's run
    archive = _archive(run_dir)
    gone = [path.name for path in (run_dir.summary, run_dir.states, run_dir.plan, run_dir.edits, run_dir.unusable)]

    def take(node: Node) -> tuple[Node, Any]:
        with calls.to(node.host, "take", str(run_dir.path), mark, str(node.number), *gone) as (stdin, stdout):
            with suppress(BrokenPipeError):  # it needs none
                stdin.write(archive)
                stdin.close()
            said = calls.answer(stdout, dict)
            if not isinstance(said.get("disk"), int | None) or not isinstance(said.get("whole"), list):
                raise ValueError("its answer cannot be read")
            return node, said

    answers = at_once(take, [node for node in nodes if not node.is_here], calls, most=_MOST_HOSTS)
    whole = {node.host: ", ".join(map(str, said["whole"])) for node, said in answers if said["whole"]}
    if whole:
        rows = [f"{host}: {run_dir.path} holds {names}" for host, names in whole.items()]
        hint = "A run that was started there wrote them. Move them, or start the run there."
        raise Conflict("\n".join(rows), hint=hint)
    apart = {node: said["disk"] for node, said in answers if said["disk"] is not None}
    if apart:
        what = "the run directory and dstrain" if checkout() else "the run directory"
        tell(f"copied {what} to {', '.join(node.host for node in apart)} ({format_bytes(len(archive))} each)")
    groups = [[node for node in apart if apart[node] == number] for number in dict.fromkeys(apart.values())]
    return tuple(
        Disk(host=group[0].host, ranks=frozenset(rank for node in group for rank in node.ranks)) for group in groups
    )


def at_once(do: Callable[[Place], Found], places: Sequence[Place], calls: Transfers, *, most: int) -> list[Found]:
    """Returns the result of each place. Raises one error for all places that failed."""

    def attempt(place: Place) -> Found | TransferFailed:
        try:
            return do(place)
        except TransferFailed as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, min(most, len(places)))) as pool:
        futures = [pool.submit(attempt, place) for place in places]
        try:
            results = [future.result() for future in futures]
        except BaseException:
            calls.close()
            raise
    failures = [result for result in results if isinstance(result, TransferFailed)]
    if failures and all(failure.is_lost for failure in failures):
        raise Unreachable({failure.host: failure.said for failure in failures})
    if failures:
        raise EnvironmentProblem("\n".join(failure.problem for failure in failures))
    return [result for result in results if not isinstance(result, TransferFailed)]


def _archive(run_dir: RunDir) -> bytes:
    """Returns an archive of what launchers and ranks read, with the metrics so far, which they extend."""
    paths = (
        *(run_dir.request, run_dir.facts, run_dir.plan, run_dir.ds_config, run_dir.hostfile, run_dir.environment),
        *(run_dir.secrets, run_dir.start_script, run_dir.edits),
        *(run_dir.metrics, run_dir.health, run_dir.samples, *(run_dir.path / name for name in TRACKED)),
    )
    files = {path.name: path for path in paths if path.is_file()}
    root = checkout()
    for folder in _CODE if root is not None else ():
        assert root is not None
        files |= {
            f"{run_dir.code.name}/{folder}/{name}": path for name, path in remote_end.files_in(root / folder).items()
        }
    stream = io.BytesIO()
    remote_end.pack(files, stream)
    return stream.getvalue()


def push_checkpoint(
    folder: Path,
    run_dir: RunDir,
    disks: Sequence[Disk],
    calls: Transfers,
    tell: Callable[[str], None],
    *,
    num_ranks: int,
) -> None:
    """Copies a complete checkpoint to other disks, skipping files already there or not read by their ranks.

    Raises EnvironmentProblem with host and reason where that fails.
    """
    record = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    start = str(record.get("start", "")) if folder.parent == run_dir.path else ""  # elsewhere it may be of another run
    files = {name: path for name, path in remote_end.files_in(folder).items() if name != COMPLETE}
    sizes = {name: path.stat().st_size for name, path in files.items()}

    def put(disk: Disk) -> int:
        with calls.to(disk.host, "put", str(folder), start) as (stdin, stdout):
            there = calls.answer(stdout, dict | None)
            if there is None:
                return 0
            wanted = needed(files, disk.ranks, written_by=record["world_size"], num_ranks=num_ranks)
            missing = [name for name in wanted if there.get(name) != sizes[name]]
            total = sum(sizes[name] for name in missing)
            if total > _WORTH_SAYING:
                tell(f"copying {folder.name} to {disk.host} ({format_bytes(total)})")
            remote_end.pack({**{name: files[name] for name in missing}, PART: folder / COMPLETE}, stdin)
        return total

    began = time.monotonic()
    total = sum(at_once(put, disks, calls, most=_MOST_CHECKPOINTS))
    hosts = ", ".join(disk.host for disk in disks)
    tell(f"{folder.name} is on {hosts}: {format_bytes(total)} copied in {format_seconds(time.monotonic() - began)}")
