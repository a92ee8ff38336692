"""Files are written whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrain.errors import Conflict, EnvironmentProblem
from dstrain.paths import alone, leftovers, prefer_own_programs, write_atomic, write_together

ROOT = Path(__file__).parent.parent
NAMES = ("ds_config.json", "job.yaml", "hostfile")


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
    path, secret = tmp_path / "a", tmp_path / "s"
    before = os.umask(0o027)
    try:
        write_atomic(path, "1")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o600)
    write_atomic(path, "2")
    write_atomic(secret, "secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == secret.stat().st_mode & 0o777 == 0o600


def edited(folder: Path) -> tuple[dict[Path, str], dict[Path, str]]:
    """Writes three files with hand edits; returns what is to replace them, and the copies that keep the edits."""
    for name in NAMES:
        (folder / name).write_text(f"mine {name}")
    files = {folder / name: f"new {name}" for name in (*NAMES, "lock.json")}
    return files, {folder / f"{name}.bak": f"mine {name}" for name in NAMES}


def fail_renames(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """Lets the renames from the first to the last one fail, counted from 1."""
    count, replace = 0, os.replace

    def failing(source: str, target: str) -> None:
        nonlocal count
        count += 1
        if first <= count <= last:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)


@pytest.mark.parametrize("nth", range(1, 8))
def test_whichever_rename_fails_everything_is_as_it_was(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, backups = edited(tmp_path)
    fail_renames(monkeypatch, nth, nth)
    with pytest.raises(EnvironmentProblem, match="cannot be written: Input/output error; nothing was changed"):
        write_together(files, backups=backups)
    assert {name: (tmp_path / name).read_text() for name in NAMES} == {name: f"mine {name}" for name in NAMES}
    assert (leftovers(tmp_path), (tmp_path / "lock.json").exists()) == ([], False)


def test_where_nothing_can_be_put_back_it_is_said_where_everything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, backups = edited(tmp_path)
    fail_renames(monkeypatch, 6, 99)
    with pytest.raises(EnvironmentProblem, match=r"cannot be restored: \S*ds_config.json, \S*job.yaml\n") as caught:
        write_together(files, backups=backups)
    assert [path for path in leftovers(tmp_path) if str(path) not in str(caught.value.hint)] == []
    assert {path: path.read_text() for path in backups} == backups


@pytest.mark.parametrize("nth", range(1, 8))
def test_killed_before_any_rename_no_edit_is_without_a_name(nth: int, tmp_path: Path) -> None:
    files, backups = edited(tmp_path)
    program = f"""
import json, os, signal, sys
from pathlib import Path
from dstrain.paths import write_together
count, replace = 0, os.replace
def killed(source, target):
    global count
    count += 1
    if count == {nth}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
files, backups = ({{Path(name): text for name, text in each.items()}} for each in json.load(sys.stdin))
write_together(files, backups=backups)
"""
    given = json.dumps([{str(path): text for path, text in each.items()} for each in (files, backups)])
    done = subprocess.run([sys.executable, "-c", program], input=given, text=True, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    for name in NAMES:
        texts = [path.read_text() for path in (tmp_path / name, tmp_path / f"{name}.bak") if path.exists()]
        assert f"mine {name}" in texts
    assert leftovers(tmp_path)
    assert set(write_together(files, backups=backups)) <= {*files, *backups}
    assert {path: path.read_text() for path in (*files, *backups)} == {**files, **backups}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Returns a hostfile that is mounted by itself, as into a container."""
    outside, inside = tmp_path / "outside", tmp_path / "hostfile"
    outside.write_text("mine hostfile")
    inside.touch()
    if subprocess.run(["mount", "--bind", outside, inside], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not permitted here")
    yield inside
    subprocess.run(["umount", inside], check=True)


def test_a_file_that_is_mounted_by_itself_is_written_in_place(mounted: Path) -> None:
    folder = mounted.parent
    (folder / "job.yaml").write_text("mine job.yaml")
    files = {folder / "job.yaml": "new job.yaml", mounted: "new", folder / "lock.json": "new lock.json"}
    write_together(files, backups={folder / "hostfile.bak": "mine hostfile"})
    assert ((folder / "outside").read_text(), (folder / "hostfile.bak").read_text()) == ("new", "mine hostfile")
    assert leftovers(folder) == []


def test_a_mounted_file_that_cannot_be_written_leaves_the_others_as_they_were(mounted: Path) -> None:
    folder = mounted.parent
    (folder / "job.yaml").write_text("mine job.yaml")
    subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=True)
    with pytest.raises(EnvironmentProblem, match=r"hostfile: cannot be written: .*; nothing was changed"):
        write_together({folder / "job.yaml": "new", mounted: "new"}, backups={folder / "job.yaml.bak": "mine job.yaml"})
    assert ((folder / "job.yaml").read_text(), mounted.read_text()) == ("mine job.yaml", "mine hostfile")


def test_a_link_that_leads_nowhere_is_named_with_its_end(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "far").symlink_to(tmp_path / "gone" / "job.yaml")
    (tmp_path / "near").symlink_to("not_yet")
    with pytest.raises(EnvironmentProblem, match="a link to itself"):
        write_atomic(tmp_path / "loop", "text")
    with pytest.raises(EnvironmentProblem, match=r"a link to \S+/gone/job.yaml, but \S+/gone does not exist"):
        write_atomic(tmp_path / "far", "text")
    write_atomic(tmp_path / "near", "text")
    assert ((tmp_path / "not_yet").read_text(), (tmp_path / "near").is_symlink()) == ("text", True)


def test_a_second_one_is_not_let_in_and_nothing_is_left_behind(tmp_path: Path) -> None:
    lock = tmp_path / "new" / ".dstrain" / "lock.json"
    refused = pytest.raises(Conflict, match="another dstrain writes here")
    with alone(lock, "writes here"), refused, alone(lock, "writes here"):
        pass
    with alone(lock, "writes here"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_programs_of_a_virtual_environment_come_first_and_those_of_a_system_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(sys, "prefix", "/venv")
    environ = {"PATH": "/usr/bin:/venv/bin:/bin"}
    prefer_own_programs(environ)
    assert environ == {"PATH": "/venv/bin:/usr/bin:/bin"}
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    for given, expected in (("/gcc/bin:/venv/bin", "/gcc/bin:/venv/bin"), ("/gcc/bin", "/venv/bin:/gcc/bin")):
        environ = {"PATH": given}
        prefer_own_programs(environ)
        assert environ["PATH"] == expected
