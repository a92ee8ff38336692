"""Hand edits are known by the lock's text and never lost."""

from pathlib import Path

import pytest
from cases import ask

from dstrain.errors import Conflict
from dstrain.render.lock import Lock, read_lock, write_generated


def lock(text: str) -> Lock:
    return Lock(
        dstrain="0",
        deepspeed="0",
        template="t",
        template_sha256="",
        inputs={"model": "m"},
        cluster=ask(model="qwen3-8b", gpus=8).cluster,
        base={"job.yaml": text},
    )


def test_a_lock_is_read_back(tmp_path: Path) -> None:
    write_generated(tmp_path, lock("a: 1\n"))
    assert read_lock(tmp_path) == lock("a: 1\n")


def test_a_generated_file_is_replaced(tmp_path: Path) -> None:
    write_generated(tmp_path, lock("a: 1\n"))
    assert write_generated(tmp_path, lock("a: 2\n")) == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "a: 2\n"


def test_an_unchanged_file_is_not_touched(tmp_path: Path) -> None:
    write_generated(tmp_path, lock("a: 1\n"))
    before = (tmp_path / "job.yaml").stat().st_mtime_ns
    assert write_generated(tmp_path, lock("a: 1\n")) == []
    assert (tmp_path / "job.yaml").stat().st_mtime_ns == before


def test_an_edited_file_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_generated(tmp_path, lock("a: 1\n"))
    (tmp_path / "job.yaml").write_text("a: 7\n")
    with pytest.raises(Conflict, match=r"job\.yaml"):
        write_generated(tmp_path, lock("a: 2\n"))
    assert (tmp_path / "job.yaml").read_text() == "a: 7\n"
    assert read_lock(tmp_path) == lock("a: 1\n")


def test_a_file_that_was_never_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine: true\n")
    with pytest.raises(Conflict):
        write_generated(tmp_path, lock("a: 1\n"))
    assert not (tmp_path / ".dstrain").exists()
