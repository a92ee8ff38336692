"""Files are written whole or not at all."""

import os
from pathlib import Path

import pytest

from dstrain.errors import EnvironmentProblem
from dstrain.paths import write_atomic, write_together


def test_when_one_of_several_files_cannot_be_written_none_changes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(EnvironmentProblem):
        write_together({tmp_path / "a": "new", tmp_path / "a" / "b": "below a file"})
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_leaves_the_file_as_it_was() -> None:
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        write_atomic(Path("/proc/full"), "text")


def test_a_mode_is_kept_and_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = os.umask(0o027)
    try:
        write_atomic(path, "1")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o600)
    write_atomic(path, "2")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_secret_file_is_never_readable_by_others(tmp_path: Path) -> None:
    write_atomic(tmp_path / "s", "secret", mode=0o600)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
