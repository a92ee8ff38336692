"""The launcher's command line, its hostfile, the cores of ranks, and the names of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.facts.this_machine import is_this_machine, visible_devices
from dstrain.launch.command import Binding, LaunchSite, binding, launch_hostfile, local, of_node
from dstrain.launch.launch import start_script
from dstrain.rundir import RunDir

ONE = Hosts(hosts=(Host(name="gpu01", slots=2),), name="hostfile")
TWO = Hosts(hosts=(Host(name="me@gpu01", slots=8), Host(name="gpu02", slots=8)), name="hostfile")


def line(hosts: Hosts, *, ids: tuple[int, ...] | None = None) -> list[str]:
    return local(site(hosts), ids)


def site(hosts: Hosts, folder: str = "/run") -> LaunchSite:
    return LaunchSite(hosts=hosts, run_dir=RunDir(Path(folder)), python="/venv/bin/python", master_port=29500)


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_hostfile_of_this_machine_alone_never_reaches_ssh_or_job_hostfile() -> None:
    words = line(ONE)
    assert words[:4] == ["/venv/bin/python", "-P", "-m", "deepspeed.launcher.runner"]
    assert "--no_ssh" in words
    assert after(words, "--master_addr") == "127.0.0.1"
    assert after(words, "--hostfile") == "/run/hostfile"
    assert "--include" not in words
    assert launch_hostfile(ONE, ids=None, is_local=True) == "localhost slots=2\n"


def test_visible_devices_become_include_and_slots_reach_as_far() -> None:
    assert after(line(ONE, ids=(2, 5, 7)), "--include") == "localhost:2,5"
    assert launch_hostfile(ONE, ids=(2, 5, 7), is_local=True) == "localhost slots=6\n"
    with pytest.raises(EnvironmentProblem, match="asks for 2 GPUs, but CUDA_VISIBLE_DEVICES=3 shows only 1"):
        line(ONE, ids=(3,))


def test_node_by_node_each_launcher_starts_its_own_ranks_and_knows_rank_0() -> None:
    words = of_node(site(TWO, "/my run"), 1)
    assert "--no_ssh" in words
    assert (after(words, "--node_rank"), after(words, "--master_addr")) == ("1", "gpu01")
    assert words[-3:] == ["--module", "dstrain.train", "/my run"]


def test_this_machine_goes_by_many_names() -> None:
    own = {"gpu01", "gpu01.lan", "10.0.0.7"}
    here = ["localhost", "127.0.0.1", "127.0.1.1", "::1", "GPU01", "me@gpu01.lan.", "10.0.0.7"]
    others = ["gpu02", "gpu01.other", "10.0.0.70", "127.example.org"]
    assert [host for host in (*here, *others) if is_this_machine(host, own)] == here


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("GPU-8932f937", "not UUIDs"),
        ("MIG-GPU-1/0/0", "MIG slices"),
        ("", "hides every GPU"),
        ("-1", "hides every GPU"),
        ("0,0", "twice"),
        ("0,GPU-1", "not UUIDs"),
    ],
)
def test_devices_that_include_cannot_name_are_refused_with_what_to_type(value: str, words: str) -> None:
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        visible_devices(value)
    assert caught.value.hint


def test_the_start_script_is_quoted_and_names_secrets_without_their_values() -> None:
    text = start_script(
        ["/venv/bin/python", "-m", "x", "/a b"],
        run_dir=RunDir(Path("/a b")),
        exported={"A": "$(rm -rf /)"},
        secret_names=["HF_TOKEN"],
    )
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "cd '/a b'\n" in text
    assert "export A='$(rm -rf /)'\n" in text
    assert "MASTER_PORT HF_TOKEN\n" in text
    assert text.endswith("exec \\\n  /venv/bin/python \\\n  -m \\\n  x \\\n  '/a b'\n")


def test_node_by_node_the_start_script_takes_the_nodes_number(tmp_path: Path) -> None:
    (tmp_path / "environment").write_text('A=say \\"hi\\" $HOME_OF\n')
    text = start_script(
        ["echo", "--node_rank", "0", "--home"],
        run_dir=RunDir(tmp_path),
        exported={},
        secret_names=[],
        is_node_by_node=True,
    )
    (tmp_path / "start.sh").write_text(text.replace("exec ", 'echo "$A"; exec '))
    for words, env, number in ((["2"], {}, 2), ([], {"SLURM_NODEID": "5"}, 5)):
        line = ["bash", str(tmp_path / "start.sh"), *words]
        done = subprocess.run(line, env={**env, "HOME_OF": "me"}, capture_output=True, text=True)
        assert done.stdout == f'say "hi" me\n--node_rank {number} --home\n', done.stderr


ROOT = Path(__file__).parents[2]
OFFLOADED: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def numactl(folder: Path, script: str) -> dict[str, str]:
    """Returns an environment whose numactl is a script."""
    file = folder / "numactl"
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)
    return {"PATH": f"{folder}:{os.defpath}"}


def test_ranks_with_an_optimizer_on_the_cpu_share_out_the_cores(tmp_path: Path) -> None:
    bound = binding(OFFLOADED, numactl(tmp_path, 'shift 3; exec "$@"'), 1)
    assert bound.cores is not None
    assert bound.note is None
    hosts = Hosts(hosts=(Host(name="localhost", slots=1),), name="hostfile")
    run_dir = RunDir(Path("/run"))
    site = LaunchSite(hosts=hosts, run_dir=run_dir, python="python", master_port=29500, cores=bound.cores)
    words = local(site, None)
    at = words.index("--bind_cores_to_rank")
    assert words[at + 1] == f"--bind_core_list={bound.cores}"
    assert words[-1] == "/run"


NUMACTL = """
case "$1" in
--hardware) echo "available: 1 nodes (0)"; echo "node 0 cpus: 0"; exit ;;
esac
echo "$*" >> "{log}"
while [ "$1" != "{python}" ] && [ "$1" != true ]; do shift; done
exec "$@"
"""


@pytest.mark.cluster
def test_a_node_of_several_shares_out_its_own_cores(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "numactl.log", RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    (run_dir.path / "behaviour").write_text("end")
    (run_dir.path / "pid-0").touch()  # the rank of the other node
    run_dir.ds_config.write_text(json.dumps(OFFLOADED))
    hosts = Hosts(hosts=(Host(name="node-a", slots=1), Host(name="node-b", slots=1)), name="hostfile")
    run_dir.hostfile.write_text(render(hosts))
    site = LaunchSite(
        hosts=hosts, run_dir=run_dir, python=sys.executable, master_port=29512, module="tests.launch.ranks", binds=True
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "KMP_AFFINITY")}
    env = kept | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    env |= numactl(tmp_path, NUMACTL.format(log=log, python=sys.executable))
    done = subprocess.run(of_node(site, 1), env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (bound,) = (line for line in log.read_text().splitlines() if "tests.launch.ranks" in line)
    assert bound.startswith(("-m 0 -C ", "-C "))
    assert (run_dir.path / "environment-1.json").exists()


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}])
def test_other_ranks_are_bound_to_none(config: dict[str, Any], tmp_path: Path) -> None:
    assert binding(config, numactl(tmp_path, "exit 0"), 1) == Binding()


def test_what_keeps_ranks_from_being_bound_is_said(tmp_path: Path) -> None:
    def note(environment: dict[str, str], ranks: int = 1) -> str:
        bound = binding(OFFLOADED, environment, ranks)
        assert bound.cores is None
        return bound.note or ""

    refused = numactl(tmp_path, "echo 'setting membind: Operation not permitted' >&2; exit 1")
    assert "; apt-get install numactl" in note({"PATH": "/nowhere"})
    assert "may not bind here (setting membind: Operation not permitted)" in note(refused)
    assert note({**refused, "OMP_NUM_THREADS": "4"}) == "OMP_NUM_THREADS set: ranks are not bound to cores of their own"
    assert "cores for 4,096 ranks" in note(refused, 4096)
