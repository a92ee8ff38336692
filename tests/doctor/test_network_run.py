"""The network measured for real: hosts in namespaces with an sshd each, gloo, one of them with a slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dstrain.doctor import network_measure
from dstrain.doctor.network_measure import TIME_IS_UP, Listener, Site, commands, interface_variables
from dstrain.errors import EnvironmentProblem, Interrupted
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.launch.failure.outcome import Outcome
from dstrain.launch.nodes.connection import LaunchSpec, Node, per_node
from dstrain.launch.nodes.protocol import Hello
from dstrain.records import to_data
from dstrain.rundir import RunDir
from tests.facts.cluster.test_measured_links import network as measured_network
from tests.launch.network import Network

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
HOSTS = Hosts(hosts=(Host(name="node0", slots=2), Host(name="me@node1", slots=2)), name="hostfile")
_APART = "import sys, dstrain.doctor.network_measure as run; run.FOLDERS = sys.argv.pop(1); "
_APART += "from dstrain.cli.main import main; main(sys.argv[1:])"


@dataclass
class Typed:
    """A folder on node0, in which dstrain is typed."""

    network: Network
    folder: Path

    def dstrain(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Returns what a command says; logs go to the folder `apart`."""
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        environment |= {"HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        line = self.network.on(0, sys.executable, "-c", _APART, str(self.folder / "apart"), *words)
        return subprocess.run(line, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)


@dataclass
class Measured(Typed):
    """A measurement of two hosts that have no folder for logs in common."""

    answer: dict[str, Any]
    left_on_node1: str


@pytest.fixture(scope="module")
def measured(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "hostfile").write_text("node0 slots=1\nnode1 slots=1\n")
    (folder / "apart").mkdir()
    files = [Path("/etc/netns") / network.namespace(number) / "hosts" for number in range(2)]
    before = [file.read_text() for file in files]
    subprocess.run(network.on(1, "mount", "-t", "tmpfs", "tmpfs", str(folder / "apart")), check=True)
    try:
        for number, file in enumerate(files):  # as Debian has it: to itself a host is the loopback
            file.write_text(before[number].replace(f"10.77.0.{number + 1} ", "127.0.1.1 "))
        typed = Typed(network, folder)
        done = typed.dstrain("doctor", "--network", "--hostfile", "hostfile", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        left = subprocess.run(network.on(1, "ls", str(folder / "apart")), capture_output=True, text=True, check=True)
        yield Measured(network, folder, json.loads(done.stdout), left.stdout)
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
        subprocess.run(network.on(1, "umount", str(folder / "apart")), check=True)


def test_two_hosts_are_measured_through_the_interface_that_joins_them(measured: Measured) -> None:
    found = measured.answer["network"]
    assert (found["backend"], found["hosts"], found["slots"]) == ("gloo", ["node0", "node1"], [1, 1])
    assert measured.answer["interfaces"] == {"node0": "eth0", "node1": "eth0"}


def test_all_reduces_are_timed_at_several_sizes(measured: Measured) -> None:
    timings = measured.answer["network"]["timings"]
    assert len(timings) > 1
    for each in timings:  # of two ranks the bus bandwidth is bytes over seconds
        assert each["bus_bytes_per_s"] == pytest.approx(each["num_bytes"] / each["seconds"])


def test_nothing_is_left_on_any_host(measured: Measured) -> None:
    assert measured.left_on_node1 == ""
    assert list((measured.folder / "apart").iterdir()) == []
    assert measured.network.lines(0) + measured.network.lines(1) == []


def test_the_next_plan_for_these_hosts_counts_with_it(measured: Measured) -> None:
    words = ("plan", "--hostfile", "hostfile", "--gpu", "cpu", "--model", "qwen3-0.6b", "--top", "1")
    cluster = json.loads(measured.dstrain(*words, "--json").stdout)["cluster"]
    largest = measured.answer["network"]["timings"][-1]
    assert cluster["inter_link"]["bytes_per_s"] == pytest.approx(largest["bus_bytes_per_s"])
    assert cluster["inter_link_origin"] == "measured"
    assert measured.answer["kept"] == str(measured.folder / ".dstrain" / "links.json")


def test_a_host_that_is_not_there_is_told(network: Network, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("node0 slots=1\nnode9 slots=1\n")
    (tmp_path / "apart").mkdir()
    done = Typed(network, tmp_path).dstrain("doctor", "--network", "--hostfile", "hostfile")
    assert done.returncode == 5
    assert "node9: ssh: Could not resolve hostname node9" in done.stderr
    assert list((tmp_path / "apart").iterdir()) == []


def test_each_host_starts_its_ranks_with_deepspeeds_launcher(tmp_path: Path) -> None:
    site = Site(hosts=HOSTS, on_cpu=True)
    found = commands(site, (True, False), RunDir(tmp_path), 29500)
    assert "--master_addr=node0" in found[1]
    assert found[1][-4:] == [
        "--node_rank=1",
        "--module",
        "dstrain.train.network_benchmark",
        '{"node0": 2, "me@node1": 2}',
    ]


def hello(interface: str | None, **changes: Any) -> Hello:
    given: dict[str, Any] = {
        "host": "a",
        "versions": {"torch": "2"},
        "shares_run_dir": False,
        "num_gpus": 0,
        "port": 29500,
    }
    given |= {"unlike": {}, "attention_packages": {}, "attention_cached": {}, "attention_downloadable": []}
    return Hello(interface=interface, clock=0.0, **(given | changes))


def met(*hellos: Hello, **exports: str) -> list[dict[str, str]]:
    """Returns what hosts that say this get in their environment."""
    nodes: tuple[Node, ...] = per_node(HOSTS, [["x"], ["x"]], [True, False])
    score = LaunchSpec(
        nodes=nodes, run_dir=RunDir(Path("/x")), mark="m", open=lambda nodes: [], environment={}, unset=(),
        exports=exports, master_port=29500,
    )  # fmt: skip
    found = interface_variables(
        Site(hosts=HOSTS, on_cpu=True), dict(zip(nodes, hellos, strict=True)), RunDir(Path("/x")), score
    )
    return list(found.values())


def test_each_host_is_told_its_own_interface_but_for_what_the_user_says() -> None:
    assert met(hello("eth0"), hello("ens3"), NCCL_SOCKET_IFNAME="x") == [
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": "ens3"},
    ]
    assert met(hello(None), hello(None)) == [{}, {}]


def test_hosts_of_different_versions_are_not_measured() -> None:
    with pytest.raises(EnvironmentProblem, match="me@node1: torch is 3; most hosts have 2"):
        met(hello("eth0"), hello("eth0", versions={"torch": "3"}))


def outcome(**changes: Any) -> Outcome:
    given: dict[str, Any] = {"succeeded": False, "code": 0, "rank_logs": {}, "launcher_logs": ()}
    return Outcome(**(given | changes))


def test_what_is_being_done_and_found_is_heard_among_other_words() -> None:
    told: list[str] = []
    listener = Listener(told.append)
    listener.hear('NCCL version 2.27\n{"doing": "all_re')
    listener.hear('duce"}\n3\n{"network": ')
    listener.hear(json.dumps(to_data(measured_network())) + "}\n")
    assert (told, listener.network) == (["all_reduce"], measured_network())


def test_ranks_that_are_stuck_say_how_far_they_came(tmp_path: Path) -> None:
    listener = Listener(lambda text: None)
    listener.hear('{"doing": "waiting for all ranks"}\n')
    site, place = Site(hosts=HOSTS, on_cpu=True), RunDir(tmp_path)
    with pytest.raises(EnvironmentProblem) as raised:
        network_measure.result(outcome(stopped_by=TIME_IS_UP), listener, site, place)
    assert "no result within 180 s; last step of the ranks: waiting for all ranks" in raised.value.problem
    assert str(place.logs) in raised.value.problem
    with pytest.raises(Interrupted):
        network_measure.result(outcome(stopped_by="SIGINT", is_interrupt=True), listener, site, place)


def test_a_rank_that_failed_is_quoted_with_advice(tmp_path: Path) -> None:
    log = tmp_path / "20261122000000_rank1.log"
    log.write_text(
        "Traceback (most recent call last):\n  File x\nRuntimeError: NCCL error in: x, ncclSystemError: System call\n"
    )
    failed = outcome(code=1, rank_logs={1: log}, launcher_logs=(log,))
    with pytest.raises(EnvironmentProblem) as raised:
        network_measure.result(failed, Listener(lambda text: None), Site(hosts=HOSTS, on_cpu=True), RunDir(tmp_path))
    assert "rank 1 on node0 failed first" in raised.value.problem
    assert "ncclSystemError" in raised.value.problem
    assert "NCCL_DEBUG=INFO" in str(raised.value.hint)
    assert "dstrain run" not in str(raised.value.hint)
