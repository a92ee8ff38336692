"""Open files of processes, of which some end while one looks."""

from __future__ import annotations

import os
from pathlib import Path

from dstrain.child_process import open_files


def test_a_process_that_has_ended_and_what_is_no_process_are_left_out(tmp_path: Path) -> None:
    for name in ("1/fd", "2", "self/fd"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("1/fd/0", "self/fd/0"):
        (tmp_path / name).symlink_to(f"/files/{name[0]}")
    (tmp_path / "1/fd/1").touch()  # closed meanwhile: no link any more
    assert list(open_files(proc=tmp_path)) == [Path("/files/1")]
    assert list(open_files([1, 3], proc=tmp_path)) == [Path("/files/1")]


def test_it_finds_a_file_of_this_process(tmp_path: Path) -> None:
    path = (tmp_path / "file").resolve()
    with path.open("w"):
        assert path in set(open_files([os.getpid()]))
        assert path in set(open_files())
