"""`dstrain doctor --hostfile` over real ssh: three network namespaces, each with an sshd."""

from __future__ import annotations

import json
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


def doctor(
    network: Network, folder: Path, *words: str, hosts: str = "node0 node1 node2"
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Returns what the doctor says of the hosts, asked on node0, and after how many seconds."""
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts.split()))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["TORCH_EXTENSIONS_DIR"] = str(folder)
    line = network.on(0, sys.executable, "-m", "dstrain.cli", "doctor", "--hostfile", "hostfile", *words)
    started = time.monotonic()
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - started


def test_three_hosts_are_counted_and_agree_on_an_interface(network: Network, tmp_path: Path) -> None:
    done, _ = doctor(network, tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert list(found["hosts"]) == ["node0", "node1", "node2"]
    assert found["environment"] == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    whats = [each["what"] for each in found["hosts"]["node1"]]
    assert any(what.startswith("eth0 (10.77.0.2, MTU 1500") and what.endswith("other hosts") for what in whats)


def test_a_black_hole_is_told_within_ten_seconds(network: Network, tmp_path: Path) -> None:
    network.sshds[1].send_signal(signal.SIGSTOP)
    try:
        done, took = doctor(network, tmp_path)
    finally:
        network.sshds[1].send_signal(signal.SIGCONT)
    assert done.returncode == 5
    lines = done.stdout.splitlines()
    assert lines[1] == "✗ node1  0 ✓, 0 !, 1 ✗"
    told = [line for line in lines if line.startswith("  ✗ ")]
    assert any("no answer within 7 s" in line or "timed out" in line for line in told), lines  # ssh's own limit may win
    assert "on node1" in done.stderr
    assert took < 20  # 10 if the machine has nothing else to do


def test_an_address_where_nobody_is_is_told_within_seconds(network: Network, tmp_path: Path) -> None:
    done, took = doctor(network, tmp_path, hosts="node0 10.77.0.99")
    assert done.returncode == 5
    assert "✗ 10.77.0.99" in done.stdout
    assert took < 20  # 10 if the machine has nothing else to do


def test_what_a_host_finds_is_told_under_its_name(network: Network, tmp_path: Path) -> None:
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "lock").touch()
    old = time.time() - 600  # a younger one may be another container's
    for path in (folder / "lock", folder):
        os.utime(path, (old, old))
    done, _ = doctor(network, tmp_path)
    assert done.returncode == 5
    lines = done.stdout.splitlines()
    assert "every host" in lines  # they share the folder of extensions
    assert f"    → rm {folder}/lock" in lines
