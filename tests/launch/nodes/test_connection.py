"""The connection to an agent, the nodes of a launch, and nodes that do not match."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Optimizer
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.this_machine import versions
from dstrain.job.schema import Job
from dstrain.launch.nodes.connection import Channel, Node, check_hosts, per_node, require_compatible
from dstrain.launch.nodes.protocol import Hello, Look, decode, encode
from dstrain.launch.prepare.inputs import of_ranks
from dstrain.rundir import RunDir
from tests.attention_hosts import Machine


def test_ctrl_c_does_not_reach_the_process_of_a_connection() -> None:
    program = "import os; print('leads its session:', os.getsid(0) == os.getpid())"
    channel = Channel([sys.executable, "-P", "-c", program], os.environ, [0])
    while not channel.is_closed:
        channel.receive()
        time.sleep(0.01)
    said = channel.last_words()
    channel.close()
    assert said == "leads its session: True"


def node(number: int) -> Node:
    return Node(number=number, host=f"gpu{number}", is_here=not number, command=(), first_rank=number, num_ranks=1)


def hello(number: int, **changed: str | None) -> Hello:
    given: dict[str, Any] = {"shares_run_dir": True, "interface": None, "num_gpus": 1, "port": 29500, "unlike": {}}
    given |= {"attention_packages": {}, "attention_cached": {}, "attention_downloadable": []}
    return Hello(host=f"gpu{number}", versions=versions(["bitsandbytes"]) | changed, clock=0.0, **given)


def test_a_node_without_a_package_of_the_job_is_named_before_the_launch() -> None:
    hellos = {node(number): hello(number, bitsandbytes="0.50.0" if number < 2 else None) for number in range(3)}
    with pytest.raises(EnvironmentProblem, match=r"gpu2: bitsandbytes is missing; most hosts have 0\.50\.0"):
        require_compatible(hellos, RunDir(Path("/run")), 29500, on_cpu=False)


def test_the_best_checkpoint_of_nodes_with_disks_of_their_own_is_refused_before_the_launch() -> None:
    hellos = {node(number): replace(hello(number), shares_run_dir=not number) for number in range(2)}
    asked: dict[str, Any] = {"on_cpu": False, "may_be_apart": True}
    require_compatible(hellos, RunDir(Path("/run")), 29500, **asked)
    with pytest.raises(EnvironmentProblem, match="all nodes share, but gpu1 has one of its own") as caught:
        require_compatible(hellos, RunDir(Path("/run")), 29500, keeps_best=True, **asked)
    assert "load_best: false" in str(caught.value.hint)


def test_only_packages_that_the_job_needs_are_compared() -> None:
    plain = Job(model="m", data="d", output_dir="o")
    assert of_ranks(plain, None) == ()
    assert of_ranks(plain, probe.read_model("qwen3-8b")) == ()
    wished = Job(model="m", data="d", output_dir="o", optimizer=Optimizer.ADAMW_8BIT)
    assert of_ranks(wished, None) == ("bitsandbytes",)
    assert of_ranks(replace(plain, liger=True), None) == ("liger_kernel", "triton")
    hybrid = replace(probe.read_model("qwen3-8b"), model_type="qwen3_5")
    assert of_ranks(plain, hybrid) == ("flash-linear-attention", "causal-conv1d")


def hello_of(machine: Machine, cache: Path) -> Hello:
    """Returns what a real agent on a machine says first."""
    look = Look(run_dir="/run", token="t", others=[], files={}, packages=[], exports={"HF_HUB_CACHE": str(cache)})
    words = [sys.executable, "-m", "dstrain.launch.nodes.agent", "0"]
    done = subprocess.run(words, env=machine.environment, input=encode(look, 0), capture_output=True, check=True)
    received = decode(done.stdout.splitlines()[0])
    assert received is not None
    assert isinstance(received[1], Hello)
    return received[1]


@pytest.mark.commands
def test_agents_tell_the_attention_kernels_of_their_nodes(tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    first.install("flash-attn", "2.8.3", module="flash_attn")
    second.install("kernels", "0.18.2", module="kernels")
    second.cache("kernels-community/flash-attn2", 4)
    hellos = [hello_of(machine, second.folder / "hub") for machine in (first, second)]
    assert [said.attention_packages for said in hellos] == [{"flash_attention_2": "2.8.3"}, {}]
    assert [said.attention_cached for said in hellos] == [{}, {"flash_attention_2": "0123456789"}]
    assert hello_of(second, tmp_path).attention_cached == {}


def test_the_ranks_of_each_host_follow_those_of_the_one_before() -> None:
    hosts = Hosts(hosts=(Host(name="gpu01", slots=8), Host(name="gpu02", slots=4)), name="hostfile")
    first, second = per_node(hosts, [["a"], ["b"]], [True, False])
    assert (list(first.ranks), list(second.ranks)) == (list(range(8)), [8, 9, 10, 11])
    assert (first.command, second.command) == (("a",), ("b",))
    check_hosts(hosts)


def test_localhost_first_of_several_hosts_is_refused() -> None:
    hosts = Hosts(hosts=(Host(name="localhost", slots=8), Host(name="gpu02", slots=8)), name="hostfile")
    with pytest.raises(InvalidConfig, match="rank 0 is on localhost, which every node resolves to itself"):
        check_hosts(hosts)
