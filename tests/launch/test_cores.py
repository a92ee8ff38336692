"""Ranks have cores of their own if the CPU steps the optimizer, and numactl may bind them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.launch.command import LaunchSite, local
from dstrain.launch.cores import Binding, binding
from dstrain.rundir import RunDir

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
    assert "cores for 4096 ranks" in note(refused, 4096)
