"""`dstrain hostfile`."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Type


def test_names_and_ranges_are_written_and_what_is_there_keeps_its_order(dstrain: Type, tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    assert dstrain("hostfile", "write", "gpu[01-02]:8,10.0.0.1:4").returncode == 0
    assert path.read_text() == "gpu01 slots=8\ngpu02 slots=8\n10.0.0.1 slots=4\n"
    path.write_text("# the fast ones\ngpu02 slots=8\n# spare\ngpu01 slots=8\nold slots=8\n")
    dstrain("hostfile", "write", "gpu[01-03]", "--slots", "4")
    assert path.read_text() == "# the fast ones\ngpu02 slots=4\n# spare\ngpu01 slots=4\ngpu03 slots=4\n"
    path.write_text("dear diary\n")
    assert dstrain("hostfile", "write", "a:8").returncode == 3
    assert path.read_text() == "dear diary\n", "a file that is no hostfile"


@pytest.mark.parametrize("words", [("--from", "slurm"), ("--from-file", "mpi")])
def test_the_scheduler_is_asked_and_another_tools_file_is_converted(
    dstrain: Type, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "mpi").write_text("n1 slots=8 max_slots=8\nn2:8\n")
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    assert dstrain("hostfile", "write", *words, "-n", **job).stdout == "n1 slots=8\nn2 slots=8\n"
    assert not (tmp_path / "hostfile").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "Give the hosts"),
        (("a", "--from", "slurm"), 2, "give one of them"),
        (("--from", "slrum"), 2, 'Did you mean "slurm"'),
        (("--from", "pbs"), 3, "PBS_NODEFILE: not set"),
        (("a b:8",), 3, "is not a host name"),
        (("gpu[01-02]",), 3, "has no slots"),
    ],
)
def test_a_wrong_wish_is_one_clear_error(
    dstrain: Type, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    done = dstrain("hostfile", "write", *words)
    assert (done.returncode, said in done.stderr) == (code, True)
    assert not (tmp_path / "hostfile").exists()


def test_check_names_every_fault(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slot=8\nb: slots=8\nc slots=0\nd slots=8 # eight\n")
    done = dstrain("hostfile", "check")
    assert done.returncode == 3
    for line, fix in ((1, "`a slots=8`"), (2, "`b slots=8`"), (3, "no slots"), (4, "line of its own")):
        assert any(f"hostfile:{line}:" in each and fix in each for each in done.stderr.splitlines())


def test_check_asks_for_equal_slots_where_the_launcher_needs_them(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=8\nb slots=8\nc slots=4\n")
    assert dstrain("hostfile", "check").returncode == 0
    done = dstrain("hostfile", "check", "--equal")
    assert "hostfile:3:1: c has 4 slots, but most hosts have 8" in done.stderr


def test_show_says_where_each_rank_runs(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=2\nlong-name slots=1\n")
    done = dstrain("hostfile", "show")
    assert done.stdout == "a          2 slots  ranks 0 to 1  (master)\nlong-name  1 slots  rank 2\n"
    assert json.loads(dstrain("hostfile", "show", "--json").stdout)["num_slots"] == 3
    done = dstrain("hostfile", "show", "nowhere")
    assert (done.returncode, "no such file" in done.stderr) == (3, True)
