"""What a node does before its ranks start."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.facts.deepspeed_ops import torch_folder
from dstrain.launch.nodes.connection import new_mark
from dstrain.launch.nodes.node_runner import environment_of_ranks
from dstrain.launch.nodes.process_tree import ProcessTree, adopting_orphans
from dstrain.launch.nodes.protocol import Begin
from dstrain.launch.nodes.ready import Readying, build, reach


def locked(folder: Path, *, is_built: bool) -> Path:
    """Writes an extension with a lock that is old enough to be nobody's; returns the lock."""
    folder.mkdir()
    lock = folder / "lock"
    lock.touch()
    if is_built:
        (folder / "build.ninja").write_text(f"cflags = -isystem {torch_folder()}/include\n")
        (folder / "cpu_adam.so").touch()
    old = time.time() - 1000
    at = max(((torch_folder() or folder) / "version.py").stat().st_mtime, old) if is_built else old
    for path in folder.iterdir():
        os.utime(path, (at, at))
    return lock


def test_a_lock_that_nobody_needs_is_removed(tmp_path: Path) -> None:
    lock = locked(tmp_path / "cpu_adam", is_built=True)
    said: list[str] = []
    build(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}, said.append)
    assert not lock.exists()
    assert said == [f"removed {lock}: the extension is built, and no visible process loads it"]


def test_a_stale_lock_is_named_with_its_age_and_stays(tmp_path: Path) -> None:
    lock = locked(tmp_path / "cpu_adam", is_built=False)
    with pytest.raises(EnvironmentProblem, match="its folder has not changed for 16 min") as raised:
        build(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}, print)
    assert lock.exists()
    assert f"rm {lock}" in str(raised.value.hint)


def test_a_port_on_which_nobody_listens_is_named_with_host_and_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        reach("localhost", port)
    with pytest.raises(EnvironmentProblem, match=rf"localhost, port {port}, .*127\.0\.0\.1: Connection refused"):
        reach("localhost", port)


def test_a_name_that_this_host_does_not_know_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"it cannot resolve no-such-host\.invalid, the host of rank 0"):
        reach("no-such-host.invalid", 29500)


_SLOW_COMPILER = """#!/bin/sh
case "$*" in *"-c "*) sleep 4321 & wait;; *) exec c++ "$@";; esac
"""
"""Compiles for ever in a process of its own, as `c++` does in `cc1plus`."""


@pytest.mark.commands
def test_what_compiles_ends_with_the_build_and_its_lock_is_removed(tmp_path: Path) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text(_SLOW_COMPILER)
    compiler.chmod(0o755)
    begin = Begin(
        host="node0", run_dir=str(tmp_path), mark=new_mark(), first_rank=0, num_ranks=1, master_port=29500,
        ops=["deepspeed_shm_comm"],
    )  # fmt: skip
    own = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(compiler), "DS_ACCELERATOR": "cpu"}
    family = ProcessTree(begin.mark, -1)
    with adopting_orphans():
        readying = Readying(begin, environment_of_ranks(begin, {**os.environ, **own}))
        said: list[object] = []
        until = time.monotonic() + 300
        while b"sleep\x004321\x00" not in [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family.alive()]:
            said += readying.poll()
            assert time.monotonic() < until, said
            time.sleep(0.1)
        readying.end()
    assert family.alive() == []
    assert list(tmp_path.glob("*/lock")) == []
