"""Hosts are asked over real ssh: three network namespaces, each with an sshd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.network import Network

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def check(network: Network, folder: Path, *words: str, hosts: str = "node0 node1 node2") -> tuple[int, str, float]:
    """Returns the exit code, the output and the seconds of `dstrain hostfile check --reach` on node0."""
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts.split()))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    line = network.on(0, sys.executable, "-m", "dstrain.cli", "hostfile", "check", "--reach", *words)
    started = time.monotonic()
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def test_hosts_that_are_alike_are_fit(network: Network, tmp_path: Path) -> None:
    code, said, _ = check(network, tmp_path)
    assert (code, said.count("✓")) == (0, 3), said


def test_a_host_that_never_answers_is_told_within_ten_seconds(network: Network, tmp_path: Path) -> None:
    network.sshds[1].send_signal(signal.SIGSTOP)
    try:
        code, said, took = check(network, tmp_path)
    finally:
        network.sshds[1].send_signal(signal.SIGCONT)
    assert code == 5
    assert "✗ node1  " in said
    assert "1 of 3 hosts not fit: node1" in said
    assert took < 10


def test_a_host_with_another_version_is_told(network: Network, tmp_path: Path) -> None:
    other = tmp_path / "site" / "deepspeed-0.18.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n")
    command = tmp_path / "command"
    command.write_text(
        f'#!/bin/sh\nexec sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | sed \'s#PYTHONPATH=#&{tmp_path / "site"}:#\')"\n'
    )
    command.chmod(0o755)
    network.configure_sshd(2, f"ForceCommand {command}")
    network.restart_sshd(2)
    try:
        code, said, _ = check(network, tmp_path)
    finally:
        network.configure_sshd(2)
        network.restart_sshd(2)
    assert code == 5
    assert "✗ node2  deepspeed is 0.18.0; most hosts have 0.19.8" in said


def test_what_the_job_reads_must_be_there(network: Network, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: ./nowhere\noutput_dir: out\n")
    code, said, _ = check(network, tmp_path, "--job", "job.yaml")
    assert code == 5
    assert f"{tmp_path / 'nowhere'} cannot be read" in said


def test_a_name_that_nobody_has_is_told_by_ssh(network: Network, tmp_path: Path) -> None:
    code, said, _ = check(network, tmp_path, hosts="node0 node9")
    assert code == 5
    assert "Could not resolve hostname node9" in said


def test_json_has_the_problems_alone_on_stdout(network: Network, tmp_path: Path) -> None:
    import json

    code, said, _ = check(network, tmp_path, "--json")
    assert code == 0
    found = json.loads(said[: said.rindex("}") + 1])
    assert found["problems"] == {"node0": [], "node1": [], "node2": []}
