"""The buffers of DeepSpeed's CPU collectives: whose are removed, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrain.launch.nodes import node_runner
from dstrain.launch.nodes.node_runner import claim_buffers, remove_buffers


def _buffer(folder: Path, port: int, rank: int = 0) -> Path:
    path = folder / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_{rank}"
    path.write_bytes(b"buffer")
    return path


@pytest.fixture
def age(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds since every buffer was made."""
    seconds = [0.0]
    monkeypatch.setattr(node_runner, "_age_s", lambda buffer: seconds[0] if buffer.exists() else -1.0)
    yield seconds


def test_a_run_removes_its_buffers_at_the_end(tmp_path: Path) -> None:
    mine, other = _buffer(tmp_path, 29500), _buffer(tmp_path, 29501)
    remove_buffers(29500, tmp_path)
    assert not mine.exists() and other.exists()


def test_buffers_that_killed_ranks_left_are_removed(tmp_path: Path, age: list[float]) -> None:
    left = _buffer(tmp_path, 29501)
    age[0] = 60
    remove_buffers(29500, tmp_path)
    assert not left.exists()


def test_a_run_that_ends_leaves_the_buffers_of_one_that_starts_with_its_port(tmp_path: Path) -> None:
    buffer = _buffer(tmp_path, 29500)
    with buffer.open("rb"):
        remove_buffers(29500, tmp_path)
    assert buffer.exists()


def test_a_run_waits_until_another_one_with_its_port_has_started(tmp_path: Path, age: list[float]) -> None:
    buffer = _buffer(tmp_path, 29500)

    def wait(seconds: float) -> None:
        assert buffer.exists()
        age[0] += 6

    with buffer.open("rb"):
        claim_buffers(29500, tmp_path, wait)
    assert age[0] == 12 and not buffer.exists()


def test_a_run_waits_for_nobody_whose_port_is_another(tmp_path: Path) -> None:
    other = _buffer(tmp_path, 29501)
    with other.open("rb"):
        claim_buffers(29500, tmp_path, lambda _: pytest.fail("waits"))
    assert other.exists()
