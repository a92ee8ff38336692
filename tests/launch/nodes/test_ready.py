"""What a node does before its ranks start."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.facts.deepspeed_ops import torch_folder
from dstrain.launch.nodes.ready import build, reach


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
