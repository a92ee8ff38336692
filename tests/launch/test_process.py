"""The real launcher with two CPU ranks: how a run ends, and that nothing of it is left.

In all tests but one it imports only what it uses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.network import local_port
from dstrain.heartbeat import MARK, Phase, Receiver
from dstrain.launch.command import LaunchSite, launch_hostfile, local
from dstrain.launch.environment import launcher_environment, python_path
from dstrain.launch.failure.outcome import Outcome
from dstrain.launch.failure.report import explain
from dstrain.launch.nodes.connection import LaunchSpec, connect, new_mark, per_node
from dstrain.launch.nodes.coordinator import Coordinator
from dstrain.launch.nodes.process_tree import look
from dstrain.launch.run.control import noting_signals
from dstrain.launch.timeouts import Timeouts
from dstrain.rundir import RunDir
from tests.launch.hosts import LIGHT_LAUNCHER
from tests.train.launching import environment, make_run

pytestmark = [pytest.mark.cluster, pytest.mark.parts(2)]

HOSTS = Hosts(hosts=(Host(name="localhost", slots=2),), name="hostfile")
GRACE_S = 6.0


@dataclass
class Started:
    outcome: Outcome
    run_dir: RunDir
    screen: str
    wall_s: float

    @property
    def message(self) -> str:
        return str(explain(self.outcome, hosts=HOSTS, run_dir=self.run_dir))

    def environment(self, rank: int) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.run_dir.path / f"environment-{rank}.json").read_text())
        return found


@dataclass
class Screen:
    pieces: list[str] = field(default_factory=list)

    def write(self, text: str) -> None:
        self.pieces.append(text)


def launch(
    folder: Path,
    behaviour: str,
    interfere: Callable[[RunDir], None] | None = None,
    *,
    grace_s: float = GRACE_S,
    is_light: bool = True,
    **variables: str,
) -> Started:
    run_dir = RunDir(folder)
    (folder / "behaviour").write_text(behaviour)
    run_dir.hostfile.write_text(launch_hostfile(HOSTS, ids=None, is_local=True))
    master_port, _ = local_port(None, {})
    site = LaunchSite(
        hosts=HOSTS, run_dir=run_dir, python=sys.executable, master_port=master_port, module="tests.launch.ranks"
    )
    paths = [python_path(os.environ)]
    if is_light:
        paths.append(str(LIGHT_LAUNCHER))
    exported = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths), **variables}
    env = launcher_environment(os.environ, exported, {})
    thread = threading.Thread(target=interfere, args=(run_dir,)) if interfere else None
    screen = Screen()
    if thread:
        thread.start()
    begin = time.monotonic()
    score = LaunchSpec(
        nodes=per_node(HOSTS, [local(site, None)], [True]),
        run_dir=run_dir,
        mark=new_mark(),
        open=lambda nodes: connect(nodes, env, ""),
        environment={},
        unset=(),
        exports={},
        master_port=master_port,
        timeouts=Timeouts(grace_s=grace_s, start_s=0),
    )
    with noting_signals(folder / "screen.log") as stop_requests:
        outcome = Coordinator(score, stop_requests, screen.write, partial(note_count, folder)).run(
            lambda hellos: (score, {})
        )
    if thread:
        thread.join()
    started = Started(outcome, run_dir, "".join(screen.pieces), time.monotonic() - begin)
    assert left_over(started.environment(0)[MARK]) == []
    assert not (folder / "cpu_adam" / "lock").exists()
    if (folder / "hidden").exists():
        hidden = [look(int(pid)) for pid in (folder / "hidden").read_text().split()]
        assert [process for process in hidden if process is not None and process.state != "Z"] == []
    return started


def note_count(folder: Path, phase: Phase, done: int | None, total: int) -> None:
    if phase is not Phase.STEP:
        (folder / f"{phase}-{done}-of-{total}").touch()


def left_over(mark: str) -> list[int]:
    """Returns the processes that carry the mark of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def pid_of(run_dir: RunDir, rank: int) -> int:
    """Returns the process of a rank, once both ranks are there and had time to be noticed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all((run_dir.path / f"ready-{number}").exists() for number in (0, 1)):
            time.sleep(0.8)
            return int((run_dir.path / f"pid-{rank}").read_text())
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_that_end_well_are_a_success_and_rank_0_is_on_the_screen(tmp_path: Path) -> None:
    started = launch(tmp_path, "end", is_light=False)
    assert started.outcome.succeeded
    assert started.outcome.code == 0
    assert started.screen == "hello from rank 0\n"
    assert sorted(started.outcome.rank_logs) == [0, 1]
    assert started.outcome.rank_logs[1].read_text() == "hello from rank 1\n"


def test_the_first_traceback_of_the_first_failing_rank_is_shown_once(tmp_path: Path) -> None:
    started = launch(tmp_path, "raise", grace_s=60)  # busy cores must not make us kill the launcher before it ends
    assert not started.outcome.succeeded
    assert started.outcome.code == 1
    message = started.message
    assert message.startswith("rank 1 failed first")
    assert message.count("Traceback (most recent call last)") == 2  # the error and its cause
    assert "KeyError: 'cause'" in message
    assert "ValueError: rank 1 is at fault" in message
    assert "Connection closed by peer" not in message
    assert "dstrain run" in message


def test_a_killed_rank_takes_the_others_along_and_its_code_is_decoded(tmp_path: Path) -> None:
    started = launch(tmp_path, "wait", lambda run_dir: os.kill(pid_of(run_dir, 1), signal.SIGKILL))
    assert not started.outcome.succeeded
    assert (started.outcome.deaths[0].rank, started.outcome.deaths[0].code) == (1, -signal.SIGKILL)
    assert "rank 1 failed first" in started.message
    assert "SIGKILL): the kernel's log " in started.message
    assert "out of memory" not in started.message
    assert "hello from rank 1" in started.message
    assert started.wall_s < 30


def test_a_rank_that_ends_well_in_the_midst_of_training_is_the_cause_and_no_hang(tmp_path: Path) -> None:
    started = launch(tmp_path, "leave")
    assert (started.outcome.deaths[0].rank, started.outcome.deaths[0].code) == (1, 0)
    cause = "rank 1 failed first: code 0: it left after step 20 of 60, and the others wait for it"
    assert started.message.startswith(f"{cause}\n")
    assert started.wall_s < 30


def test_a_killed_launch_process_is_a_failure_and_leaves_no_orphans(tmp_path: Path) -> None:
    started = launch(tmp_path, "wait", lambda run_dir: os.kill(parent_of(pid_of(run_dir, 0)), signal.SIGKILL))
    assert not started.outcome.succeeded
    assert started.outcome.orphaned == ("localhost",)
    assert started.message.startswith("the launcher was killed (python -m deepspeed.launcher.launch)")


def test_sigterm_to_us_ends_every_rank_and_what_one_counts_was_heard(tmp_path: Path) -> None:
    counted = tmp_path / "tokenizing-3-of-10"

    def interrupt(run_dir: RunDir) -> None:
        pid_of(run_dir, 0)
        deadline = time.monotonic() + 60
        while not counted.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    started = launch(tmp_path, "wait", interrupt)
    assert started.outcome.stopped_by == "SIGTERM"
    assert not started.outcome.succeeded
    assert started.message.startswith("stopped (SIGTERM); no rank is left running")
    assert counted.exists()


def test_sigterm_to_every_process_leaves_the_launcher_to_ranks_that_save(tmp_path: Path) -> None:
    seen: list[bool] = []

    def interrupt(run_dir: RunDir) -> None:
        launcher = parent_of(pid_of(run_dir, 0))
        os.kill(launcher, signal.SIGTERM)
        time.sleep(1.5)
        process = look(launcher)
        seen.append(process is not None and process.state != "Z")
        os.kill(os.getpid(), signal.SIGINT)

    launch(tmp_path, "wait", interrupt, DSTRAIN_SAVE_ON_TERM="1")
    assert seen == [True]


def test_a_second_ctrl_c_kills_ranks_that_do_not_listen(tmp_path: Path) -> None:
    times: list[float] = []

    def interrupt(run_dir: RunDir) -> None:
        pid_of(run_dir, 0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    started = launch(tmp_path, "ignore", interrupt)
    assert time.monotonic() - times[0] < GRACE_S - 0.5
    assert started.outcome.is_interrupt


def test_a_real_rank_0_that_finds_its_port_taken_says_so(demo: Path, tmp_path: Path) -> None:
    mark = new_mark()
    pulses = Receiver(mark, range(2))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port_taken = str(other.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        variables = {**environment(tmp_path), **place, "MASTER_PORT": port_taken, MARK: mark}
        line = [sys.executable, "-m", "dstrain.train", str(make_run(tmp_path / "run", demo))]
        done = subprocess.run(line, env=variables, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert Phase.PORT_TAKEN in {pulse.phase for pulse in pulses.receive()}, done.stderr
    pulses.close()
