"""Hand edits are known by the lock's text and never lost."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cases import ask

from dstrain.errors import Conflict, InvalidConfig
from dstrain.render.lock import LOCK, Lock, read_lock, standing, write_files
from dstrain.render.merge import Clash
from dstrain.render.regenerate import Decision, Regenerated, Standing, regenerate, replaced, unsettled


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


def write(folder: Path, text: str, **beside: str) -> list[str]:
    return write_files(folder, lock(text), {"job.yaml": text}, beside)


def test_a_lock_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, "a: 1\n")
    assert read_lock(tmp_path) == lock("a: 1\n")


def test_open_conflicts_are_read_back(tmp_path: Path) -> None:
    held = replace(lock("a: 1\n"), unsettled={"job.yaml": (("lora", "rank"),)}, cluster=None, template=None)
    write_files(tmp_path, held, {}, {})
    assert read_lock(tmp_path) == held


def test_an_unchanged_file_is_not_touched(tmp_path: Path) -> None:
    assert write(tmp_path, "a: 1\n") == ["job.yaml"]
    before = (tmp_path / "job.yaml").stat().st_mtime_ns
    assert write(tmp_path, "a: 1\n") == []
    assert (tmp_path / "job.yaml").stat().st_mtime_ns == before


def test_windows_line_ends_are_a_difference(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"a: 1\r\n")
    assert standing(tmp_path, ["job.yaml"]) == {"job.yaml": "a: 1\r\n"}
    assert write(tmp_path, "a: 1\n") == ["job.yaml"]


def test_copies_of_a_private_file_are_private(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: 1\n")
    (tmp_path / "job.yaml").chmod(0o600)
    write_files(tmp_path, lock("a: 2\n"), {"job.yaml": "a: 2\n"}, {"job.yaml.bak": "a: 1\n"})
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("job.yaml", "job.yaml.bak", LOCK)}
    assert modes == {0o600}


def test_a_file_that_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(InvalidConfig, match=r"job\.yaml:2:4: is not UTF-8"):
        standing(tmp_path, ["job.yaml"])


def test_a_folder_in_place_of_a_file_is_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").mkdir()
    with pytest.raises(Conflict):
        standing(tmp_path, ["job.yaml"])


def of(base: str | None, yours: str | None, new: str, name: str = "job.yaml", *, decision: str = "open") -> Regenerated:
    def decide(file: str, clash: Clash) -> Decision:
        return Decision(decision)

    file = Standing(name=name, shown=name, base=base, yours=yours, new=new, unsettled=())
    return regenerate([file], decide)


def test_an_unedited_file_becomes_the_new_text() -> None:
    assert of("a: 1\n", "a: 1\n", "# other\na: 2\n").files == {"job.yaml": "# other\na: 2\n"}


def test_a_file_that_was_removed_is_written_again() -> None:
    assert of("a: 1\n", None, "a: 2\n").files == {"job.yaml": "a: 2\n"}


def test_a_file_that_was_never_generated_is_foreign() -> None:
    found = of(None, "a: 1\n", "a: 2\n")
    assert (found.foreign, dict(found.files)) == (("job.yaml",), {})


def test_a_foreign_file_with_the_very_text_is_ours() -> None:
    assert of(None, "a: 2\n", "a: 2\n").foreign == ()


@pytest.mark.parametrize(
    ("decision", "text"), [("open", "a: 7\nb: 2\n"), ("keep", "a: 7\nb: 2\n"), ("new", "a: 2\nb: 2\n")]
)
def test_a_conflict_is_decided(decision: str, text: str) -> None:
    found = of("a: 1\nb: 1\n", "a: 7\nb: 1\n", "a: 2\nb: 2\n", decision=decision)
    assert found.files == {"job.yaml": text}
    assert found.beside == ({"job.yaml.new": "a: 2\nb: 2\n"} if decision == "open" else {})
    assert unsettled(found, {}) == ({"job.yaml": (("a",),)} if decision == "open" else {})


def test_a_comment_you_did_not_touch_follows_the_new_text() -> None:
    base, new = "a: 8  # 64 samples\nb: 1\n", "a: 4  # 32 samples\nb: 1\n"
    assert of(base, base.replace("b: 1", "b: 2"), new).files["job.yaml"] == "a: 4  # 32 samples\nb: 2\n"


def test_a_comment_of_yours_stays_when_the_value_changes() -> None:
    found = of("a: 8  # 64 samples\n", "a: 8  # mine\n", "a: 4  # 32 samples\n")
    assert found.files["job.yaml"] == "a: 4  # mine\n"


def test_a_generated_comment_goes_with_its_key() -> None:
    found = of("a: 8  # 64 samples\nb: 1\n", "a: 8  # 64 samples\nb: 2\n", "b: 1\n")
    assert found.files["job.yaml"] == "b: 2\n"


def test_placeholders_are_added_beside_hosts_that_you_filled_in() -> None:
    base, new = "CHANGE-ME-1 slots=8\n", "CHANGE-ME-1 slots=8\nCHANGE-ME-2 slots=8\n"
    found = of(base, "# rack\ngpu01 slots=8\n", new, "hostfile")
    assert found.files["hostfile"] == "# rack\ngpu01 slots=8\nCHANGE-ME-2 slots=8\n"


def test_other_machines_are_not_mixed_with_yours() -> None:
    found = of("CHANGE-ME-1 slots=8\n", "gpu01 slots=8\n", "localhost slots=4\n", "hostfile")
    assert found.files["hostfile"] == "gpu01 slots=8\n"
    assert [each.clash.pointer for each in found.open] == [("localhost",)]


def test_force_keeps_what_stood_there() -> None:
    file = Standing(name="job.yaml", shown="job.yaml", base="a: 1\n", yours="a: 7\n", new="a: 2\n", unsettled=())
    found = replaced([file])
    assert (dict(found.files), dict(found.beside)) == ({"job.yaml": "a: 2\n"}, {"job.yaml.bak": "a: 7\n"})
