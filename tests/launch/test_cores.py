"""Ranks have cores of their own if the CPU steps the optimizer, and numactl may bind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrain.facts.cluster.hostfile import Host, Hosts, render
from dstrain.launch.command import LaunchSite, local, of_node
from dstrain.launch.cores import Binding, binding
from dstrain.rundir import RunDir

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
    assert "numactl is not installed (apt-get install numactl)" in note({"PATH": "/nowhere"})
    assert "may not bind here (setting membind: Operation not permitted)" in note(refused)
    assert note({**refused, "OMP_NUM_THREADS": "4"}) == "OMP_NUM_THREADS set: ranks are not bound to cores of their own"
    assert "cores for 4,096 ranks" in note(refused, 4096)
