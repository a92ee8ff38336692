"""`dstrain export`: what it refuses; what it makes is tested where training is."""

from pathlib import Path

import pytest

from tests.cli.conftest import Type, lay_traps


@pytest.mark.parametrize(
    ("source", "made", "said"),
    [
        ("output", None, "output: no such folder"),
        ("output", "output", ""),
        ("checkpoint-5", "checkpoint-5/global_step5", ""),
    ],
    ids=["missing", "no run", "half written"],
)
def test_a_folder_that_cannot_be_exported_is_refused_without_a_traceback(
    dstrain: Type, tmp_path: Path, source: str, made: str | None, said: str
) -> None:
    if made:
        (tmp_path / made).mkdir(parents=True)
    lay_traps(tmp_path)
    done = dstrain("export", source, "merged")
    assert (done.returncode, said in done.stderr) == (3, True), done.stderr
    assert ("was run" in done.stderr, "Traceback" in done.stderr) == (False, False)
    assert not (tmp_path / "merged").exists()
