"""What the kernel says about processes that it killed because memory ran out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrain.facts import kernel_messages
from dstrain.facts.kernel_messages import OUT_OF_MEMORY, MemoryKills

V1 = Path("/sys/fs/cgroup/memory")
HUNGRY = "import sys; sys.stdin.read(1); held = [bytearray(2**20) for _ in range(400)]"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Returns a memory cgroup of 50 MiB."""
    group = V1 / f"dstrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(50 * 2**20))
    except OSError:
        pytest.skip("needs to make memory cgroups")
    yield group
    with contextlib.suppress(OSError):
        group.rmdir()


def ended(group: Path | None) -> int:
    """Returns the process number of a program that SIGKILL has ended, in this group for want of memory."""
    with subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE) as child:
        if group is None:
            child.kill()
        else:
            (group / "cgroup.procs").write_text(str(child.pid))
            with contextlib.suppress(BrokenPipeError):
                child.communicate(b"x")
        assert child.wait() == -9
    return child.pid


def test_a_process_that_the_kernel_killed_for_memory_is_told_from_one_that_was_killed(small_group: Path) -> None:
    kills = MemoryKills()
    other, hungry = ended(None), ended(small_group)
    if kernel_messages.read(os.environ).problem is not None:
        pytest.skip("needs to read the kernel's log")
    assert kills.verdict(hungry).startswith(f"{OUT_OF_MEMORY} (the kernel's log: Memory cgroup out of memory: Killed")
    assert OUT_OF_MEMORY not in kills.verdict(other)
    assert OUT_OF_MEMORY not in MemoryKills().verdict(hungry)  # it died before


def test_a_log_that_cannot_be_read_is_no_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = MemoryKills().verdict(1)
    assert "the kernel's log cannot be read (neither dmesg nor journalctl is installed)" in words
    assert OUT_OF_MEMORY not in words


@pytest.mark.parametrize(
    ("said", "file", "content", "count"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "oom 3\noom_kill 2\n", 2),
        ("0::/", "sys/fs/cgroup/memory.events", "oom_kill 1\n", 1),
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 5\n", 5),
        ("4:memory:/elsewhere", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 1\n", 1),
        ("1:cpu:/job", "sys/fs/cgroup/cpu/job/memory.events", "oom_kill 1\n", None),
    ],
)
def test_kills_are_counted_in_both_versions_of_cgroups(
    tmp_path: Path, said: str, file: str, content: str, count: int | None
) -> None:
    for name, text in (("proc/self/cgroup", f"{said}\n"), (file, content)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert kernel_messages._count(tmp_path) == count
