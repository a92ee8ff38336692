"""`dstrain export`: what it refuses; what it makes is tested where training is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import lay_traps

Type = Callable[..., Any]


def test_a_missing_source_is_named(dstrain: Type) -> None:
    done = dstrain("export", "output", "merged")
    assert (done.returncode, "output: no such folder" in done.stderr) == (3, True)


def test_a_folder_that_is_no_run_is_refused_without_a_traceback(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    lay_traps(tmp_path)
    done = dstrain("export", "output", "merged")
    assert done.returncode == 3
    assert "was run" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "merged").exists()


def test_a_half_written_checkpoint_is_refused(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5" / "global_step5").mkdir(parents=True)
    done = dstrain("export", "checkpoint-5", "merged")
    assert done.returncode == 3
    assert not (tmp_path / "merged").exists()
