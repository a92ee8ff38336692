"""What travels between disks: run directories and checkpoints there, parts of checkpoints back."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.launch import filesync, remote
from dstrain.launch.filesync import CheckpointGatherer, Copies, CopyFailed, Disk, push, push_checkpoint
from dstrain.launch.nodes.connection import Node
from dstrain.launch.nodes.members import Unreachable
from dstrain.launch.nodes.node_runner import Mirror
from dstrain.launch.nodes.protocol import Wrote
from dstrain.rundir import RunDir, is_whole

pytestmark = pytest.mark.commands

MARK = "a" * 32
SAID: list[str] = []


def node(number: int, *, is_here: bool = False) -> Node:
    return Node(number=number, host=f"node{number}", is_here=is_here, command=(), first_rank=number, num_ranks=1)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """The run directory of `run`; on a host `nodeN` its path leads to a folder `nodeN` beside it."""

    def on_host(host: str, command: Sequence[str], **options: object) -> list[str]:
        return [word.replace(str(tmp_path / "head"), str(tmp_path / host)) for word in command]

    def shell(**options: object) -> list[str]:
        return [str(tmp_path / "rsh"), str(tmp_path)]

    program = 'for word; do shift; set -- "$@" "$(echo "$word" | sed "s|$top/head|$top/$host|")"; done'
    (tmp_path / "rsh").write_text(f'#!/bin/sh\ntop=$1 host=$2\nshift 2\n{program}\nexec "$@"\n')
    (tmp_path / "rsh").chmod(0o755)
    monkeypatch.setattr(remote, "on_host", on_host)
    monkeypatch.setattr(remote, "shell", shell)
    monkeypatch.setattr(
        filesync, "_OPTIONS", filesync._OPTIONS.replace("s", "")
    )  # paths are words, which the shell replaces
    SAID.clear()
    place = RunDir(tmp_path / "head" / "output")
    place.path.mkdir(parents=True)
    place.request.write_text("{}")
    place.secrets.write_text("KEY=1\n")
    place.secrets.chmod(0o600)
    return place


def on(head: RunDir, host: str) -> Path:
    """Returns the run directory of a host."""
    return head.path.parents[1] / host / "output"


def send(head: RunDir, *numbers: int) -> tuple[Disk, ...]:
    return push([node(0, is_here=True), *map(node, numbers)], head, MARK, Copies(by_srun=False), SAID.append)


def part(folder: Path, step: int, rank: int, *, start: str = MARK, text: str = "states") -> Path:
    """Writes a rank's part of a checkpoint of two ranks, on its disk."""
    checkpoint = folder / f"checkpoint-{step}"
    shards = checkpoint / f"global_step{step}"
    shards.mkdir(parents=True, exist_ok=True)
    (shards / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_text(text)
    (checkpoint / f"rng_state_{rank}.pth").write_text(str(rank))
    (checkpoint / "part.json").write_text(json.dumps({"step": step, "world_size": 2, "zero_stage": 2, "start": start}))
    return checkpoint


def gathering(head: RunDir, *, limit: int | None = 2) -> CheckpointGatherer:
    disks = [Disk(host="node1", ranks=frozenset({1}))]
    return CheckpointGatherer(head, MARK, disks, Copies(by_srun=False), SAID.append, limit=limit)


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until, SAID
        time.sleep(0.05)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_disk_of_its_own_gets_the_run_directory_and_the_checkout_but_no_token(head: RunDir) -> None:
    (disk,) = send(head, 1)
    there = on(head, "node1")
    assert disk == Disk(host="node1", ranks=frozenset({1}))
    assert (there / "request.json").read_text() == "{}"
    assert (there / ".secrets").stat().st_mode & 0o777 == 0o600
    assert (there / ".code/dstrain/launch/filesync.py").read_text() == Path(filesync.__file__).read_text()
    assert not (there / ".token").exists()
    assert not list(there.rglob("__pycache__"))
    assert not head.code.exists()


def test_a_node_that_sees_the_token_gets_nothing(head: RunDir) -> None:
    on(head, "node1").mkdir(parents=True)
    (on(head, "node1") / ".token").write_text(MARK)
    assert send(head, 1) == ()
    assert not (on(head, "node1") / "request.json").exists()


def test_nodes_that_share_a_disk_are_one_disk(head: RunDir) -> None:
    on(head, "node1").mkdir(parents=True)
    on(head, "node2").parent.symlink_to(on(head, "node1").parent)
    assert send(head, 1, 2) == (Disk(host="node1", ranks=frozenset({1, 2})),)


def test_what_an_earlier_start_left_there_goes(head: RunDir) -> None:
    there = on(head, "node1")
    (there / ".code" / "dstrain").mkdir(parents=True)
    (there / ".code" / "dstrain" / "module_of_an_earlier_version.py").touch()
    (there / "summary.json").touch()
    send(head, 1)
    assert not (there / ".code" / "dstrain" / "module_of_an_earlier_version.py").exists()
    assert not (there / "summary.json").exists()


def test_checkpoints_of_a_run_that_was_started_there_are_not_touched(head: RunDir) -> None:
    folder = part(on(head, "node1"), 4, 0)
    (folder / "complete.json").touch()
    with pytest.raises(Conflict, match=r"node1: .* holds checkpoint-4"):
        send(head, 1)


def test_a_host_that_does_not_answer_is_named(head: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [sys.executable, "-c", "import sys; print('ssh: no route', file=sys.stderr); sys.exit(255)"]
    monkeypatch.setattr(remote, "on_host", lambda *arguments, **options: line)
    with pytest.raises(Unreachable, match="node1: ssh: no route") as caught:
        send(head, 1, 2)
    assert caught.value.hosts == ("node1", "node2")


def test_a_disk_that_takes_nothing_is_named(head: RunDir) -> None:
    on(head, "node1").parent.write_text("a file")
    with pytest.raises(EnvironmentProblem, match=r"node1: .*/node1.*: Not a directory"):
        send(head, 1)


def test_a_host_without_rsync_is_named_with_what_to_type(head: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = shutil.which("sh")
    monkeypatch.setattr(remote, "on_host", lambda host, words, **options: ["env", "PATH=", str(shell), *words[1:]])
    with pytest.raises(EnvironmentProblem, match="node1: rsync is not installed there: apt-get install rsync"):
        send(head, 1)


def test_a_machine_without_rsync_says_what_to_type(head: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentProblem, match="--sync needs rsync, which is not installed") as caught:
        send(head, 1)
    assert caught.value.hint == "apt-get install rsync"


def test_what_is_under_way_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "on_host", lambda *arguments, **options: ["sleep", "60"])
    under_way = Copies(by_srun=False)
    threading.Timer(0.5, under_way.close).start()
    began = time.monotonic()
    with pytest.raises(CopyFailed, match="node1"):
        under_way.sh("node1", "true")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "health.jsonl", "states.json", "summary.json", "logs/1_rank0.log", "checkpoint-5/part.json"],
)
def test_what_ranks_write_is_taken_from_a_node(head: RunDir, name: str) -> None:
    assert head.sent(name) == head.path / name


@pytest.mark.parametrize(
    "name",
    [
        *("../out", "/tmp/out", "logs/../../out.log", "logs/a/b.log", "checkpoint-5/../../part.json", "start.sh", ""),
        *("request.json", ".secrets", "environment", "checkpoint-5/complete.json", "metrics.jsonl\n", "logs/\0.log"),
        *("logs/linked.log", "checkpoint-7/part.json", "summary.json"),
    ],
)
def test_nothing_else_is(head: RunDir, name: str) -> None:
    outside = head.path.parent / "outside"
    outside.mkdir()
    head.logs.mkdir()
    for link, to in (("logs/linked.log", "../../outside/x"), ("checkpoint-7", "../outside"), ("summary.json", "../x")):
        (head.path / link).symlink_to(to)
    assert head.sent(name) is None


def whole(head: RunDir, step: int) -> Path:
    """Writes a whole checkpoint of two ranks on the disk of `run`."""
    folder = part(head.path, step, 0)
    part(head.path, step, 1)
    (folder / "model.safetensors").touch()
    (folder / "part.json").rename(folder / "complete.json")
    return folder


def give(head: RunDir, folder: Path, *, num_ranks: int = 2) -> Path:
    """Copies a checkpoint to `node1` and returns where it is there."""
    disk = Disk(host="node1", ranks=frozenset({1}))
    push_checkpoint(folder, head, [disk], Copies(by_srun=False), SAID.append, num_ranks=num_ranks)
    return on(head, "node1") / folder.name


def test_a_checkpoint_is_copied_without_what_no_rank_there_reads(head: RunDir) -> None:
    there = give(head, whole(head, 4))
    shards = [path.name for path in (there / "global_step4").iterdir()]
    assert shards == ["zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    assert sorted(path.name for path in there.glob("*.*")) == ["part.json", "rng_state_0.pth", "rng_state_1.pth"]


def test_a_checkpoint_for_another_number_of_ranks_is_copied_without_shards(head: RunDir) -> None:
    folder = whole(head, 4)
    (folder / "latest_universal").touch()
    there = give(head, folder, num_ranks=3)
    assert (there / "latest_universal").exists()
    assert not (there / "global_step4").exists()


@pytest.mark.parametrize(("start", "text"), [(MARK, "STATES"), ("b" * 32, "states")])
def test_a_shard_that_lies_there_stays_only_if_the_same_start_wrote_it(head: RunDir, start: str, text: str) -> None:
    part(on(head, "node1"), 4, 1, text="STATES", start=start)
    there = give(head, whole(head, 4))
    assert (there / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").read_text() == text


def test_parts_become_a_whole_checkpoint(head: RunDir) -> None:
    part(on(head, "node1"), 4, 1)
    folder = part(head.path, 4, 0)
    found = gathering(head)
    found.finish(lambda: None, has_trained=True)
    assert is_whole(folder)
    assert not (folder / "part.json").exists()
    assert len(list(folder.glob("global_step4/*"))) == 2
    assert SAID[0].startswith("checkpoint-4 is complete here: copied from node1")


def test_older_checkpoints_go_here_and_older_parts_there(head: RunDir) -> None:
    found = gathering(head, limit=2)
    for step in (4, 8, 12):
        part(on(head, "node1"), step, 1)
        folder = part(head.path, step, 0)
        wait_for(lambda folder=folder: is_whole(folder))  # type: ignore[misc]
    wait_for(lambda: names(on(head, "node1")) == ["checkpoint-12"])
    found.finish(lambda: None, has_trained=False)
    assert names(head.path) == ["checkpoint-12", "checkpoint-8"]


def test_only_the_newest_is_copied_where_copying_lags_behind(head: RunDir) -> None:
    for step in (4, 8, 12):
        part(on(head, "node1"), step, 1)
        part(head.path, step, 0)
    gathering(head, limit=None).finish(lambda: None, has_trained=False)
    assert names(head.path) == names(on(head, "node1")) == ["checkpoint-12"]


def test_parts_of_another_start_are_left_alone(head: RunDir) -> None:
    folder = part(head.path, 4, 0, start="b" * 32)
    gathering(head).finish(lambda: None, has_trained=False)
    assert not is_whole(folder)


def test_a_copy_that_fails_is_told_once_and_ends_nothing(head: RunDir) -> None:
    part(on(head, "node1"), 4, 1, start="b" * 32)
    folder = part(head.path, 4, 0)
    found = gathering(head)
    wait_for(lambda: bool(SAID))
    part(on(head, "node1"), 4, 1)
    found.finish(lambda: None, has_trained=False)
    assert is_whole(folder)
    assert "no part of this run's checkpoint is there" in SAID[0]
    assert len(SAID) == 2


def test_a_missing_shard_leaves_a_checkpoint_unmarked(head: RunDir) -> None:
    part(on(head, "node1"), 4, 0)
    folder = part(head.path, 4, 0)
    gathering(head).finish(lambda: None, has_trained=False)
    assert not is_whole(folder)
    assert "it has the shards of 1 of 2 ranks" in SAID[0]


def test_the_model_comes_from_the_disk_of_rank_0(head: RunDir) -> None:
    (on(head, "node1") / "final").mkdir(parents=True)
    (on(head, "node1") / "final" / "model.safetensors").write_text("weights")
    (head.final).mkdir()
    (head.final / "old.safetensors").touch()
    disks = [Disk(host="node1", ranks=frozenset({0, 1}))]
    found = CheckpointGatherer(head, MARK, disks, Copies(by_srun=False), SAID.append, limit=2)
    found.finish(lambda: None, has_trained=True)
    assert [path.name for path in head.final.iterdir()] == ["model.safetensors"]


def test_a_mirror_tells_of_checkpoints_of_its_own_start(tmp_path: Path) -> None:
    part(tmp_path, 4, 0, start="b" * 32)
    part(tmp_path, 8, 0)
    found = Mirror(RunDir(tmp_path), f"{MARK}-0", has_first=True).poll()
    assert [event.name for event in found if isinstance(event, Wrote)] == ["checkpoint-8/part.json"]
    assert Mirror(RunDir(tmp_path), f"{MARK}-1", has_first=False).poll() == []
