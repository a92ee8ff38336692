"""Hand edits are known by the lock's text and never lost."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cases import ask

from dstrain.config.edits.lock import LOCK, Lock, Unsettled, read_lock, standing, write_files
from dstrain.config.edits.regenerate import Clash, Decision, Regenerated, Standing, regenerate, replaced
from dstrain.errors import Conflict, InvalidConfig


def lock(text: str) -> Lock:
    return Lock(
        dstrain="0",
        deepspeed="0",
        template="t",
        template_sha256="",
        inputs={"model": "m"},
        cluster=ask(model="qwen3-8b", gpus=8).workload.cluster,
        base={"job.yaml": text},
    )


def write(folder: Path, text: str, **beside: str) -> list[str]:
    return write_files(folder, lock(text), {"job.yaml": text}, beside)


def test_a_lock_is_read_back_with_its_open_conflicts(tmp_path: Path) -> None:
    write(tmp_path, "a: 1\n")
    assert read_lock(tmp_path) == lock("a: 1\n")
    data = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**data, "schema": 1, "unsettled": {"job.yaml": [["lora", "rank"]]}}))
    found = read_lock(tmp_path)
    assert found is not None
    assert (found.unsettled, found.schema) == ({"job.yaml": (Unsettled(pointer=("lora", "rank")),)}, 2), "an older lock"
    opened = Unsettled(pointer=("lora", "rank"), base=(16,))
    held = replace(lock("a: 1\n"), unsettled={"job.yaml": (opened,)}, cluster=None, template=None)
    write_files(tmp_path, held, {}, {})
    assert read_lock(tmp_path) == held


def test_a_lock_of_a_newer_dstrain_is_refused_by_that_word(tmp_path: Path) -> None:
    write(tmp_path, "a: 1\n")
    data = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**data, "schema": 7, "colour": "red"}))
    with pytest.raises(InvalidConfig, match="written by a newer dstrain") as caught:
        read_lock(tmp_path)
    assert ("colour" in str(caught.value), caught.value.hint) == (False, "pip install --upgrade dstrain")


@pytest.mark.parametrize(
    ("folder", "command"), [("", "dstrain gen-config --adopt"), ("sub", "dstrain gen-config -o sub --adopt")]
)
def test_a_broken_lock_names_the_command_for_its_own_folder(
    folder: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path(folder), "a: 1\n")
    (Path(folder) / LOCK).write_text("{")
    with pytest.raises(InvalidConfig) as caught:
        read_lock(Path(folder))
    assert str(caught.value.hint).endswith(f"&& {command}")


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

    return regenerate([Standing(name=name, shown=name, base=base, yours=yours, new=new)], decide)


HEAD = "CHANGE-ME-1 slots=8\n"


@pytest.mark.parametrize(
    ("name", "base", "yours", "new", "text", "is_open"),
    [
        ("job.yaml", "a: 1\n", "a: 1\n", "# other\na: 2\n", "# other\na: 2\n", 0),  # unedited
        ("job.yaml", "a: 1\n", None, "a: 2\n", "a: 2\n", 0),  # removed
        # a comment that you did not touch follows the new text, yours stays, and a generated one goes with its key
        ("job.yaml", "a: 8  # 64\nb: 1\n", "a: 8  # 64\nb: 2\n", "a: 4  # 32\nb: 1\n", "a: 4  # 32\nb: 2\n", 0),
        ("job.yaml", "a: 8  # 64\n", "a: 8  # mine\n", "a: 4  # 32\n", "a: 4  # mine\n", 0),
        ("job.yaml", "a: 8  # 64\nb: 1\n", "a: 8  # 64\nb: 2\n", "b: 1\n", "b: 2\n", 0),
        # placeholders are added beside hosts that you filled in, and other machines are not mixed with yours
        (
            *("hostfile", HEAD, "# rack\ngpu01 slots=8\n", f"{HEAD}CHANGE-ME-2 slots=8\n"),
            *("# rack\ngpu01 slots=8\nCHANGE-ME-2 slots=8\n", 0),
        ),
        ("hostfile", HEAD, "gpu01 slots=8\n", "localhost slots=4\n", "gpu01 slots=8\n", 1),
        *(
            ("hostfile", "localhost slots=8\n", mine, f"{HEAD}CHANGE-ME-2 slots=8\n", mine, is_open)
            for mine, is_open in (("m1 slots=8\nm2 slots=8\n", 0), ("m1 slots=4\nm2 slots=4\n", 2))
        ),
    ],
)
def test_what_nobody_touched_follows_and_what_you_touched_stays(
    name: str, base: str, yours: str | None, new: str, text: str, is_open: int
) -> None:
    found = of(base, yours, new, name)
    assert (found.files, len(found.open)) == ({name: text}, is_open)


def test_a_file_that_was_never_generated_is_foreign_unless_it_has_the_very_text() -> None:
    found = of(None, "a: 1\n", "a: 2\n")
    assert (found.foreign, dict(found.files)) == (("job.yaml",), {})
    assert of(None, "a: 2\n", "a: 2\n").foreign == ()


@pytest.mark.parametrize(
    ("decision", "text"), [("open", "a: 7\nb: 2\n"), ("keep", "a: 7\nb: 2\n"), ("new", "a: 2\nb: 2\n")]
)
def test_a_conflict_is_decided(decision: str, text: str) -> None:
    found = of("a: 1\nb: 1\n", "a: 7\nb: 1\n", "a: 2\nb: 2\n", decision=decision)
    assert found.files == {"job.yaml": text}
    beside = {"open": {"job.yaml.new": "a: 2\nb: 2\n"}, "keep": {}, "new": {"job.yaml.bak": "a: 7\nb: 1\n"}}
    assert found.beside == beside[decision]
    opened = {"job.yaml": (Unsettled(pointer=("a",), base=(1,)),)}
    assert found.unsettled == (opened if decision == "open" else {})


def regenerated_over_adopted(yours: str, new: str, name: str, decision: Decision = Decision.OPEN) -> Regenerated:
    file = Standing(name=name, shown=name, base=yours, yours=yours, new=new, is_adopted=True)
    return regenerate([file], lambda file, clash: decision)


def test_all_that_would_change_in_an_adopted_file_is_a_conflict() -> None:
    yours = "seed: 43  # ours\nextra: 1\nlearning_rate: 3e-6\nepochs: 3\n"
    new = "seed: 42  # any\nlearning_rate: 1e-5\nepochs: 3  # rounds\nseq_len: 8\n"
    found = regenerated_over_adopted(yours, new, "job.yaml")
    assert [each.clash.pointer for each in found.open] == [("seed",), ("learning_rate",), ("seq_len",)]
    assert (found.files, found.beside) == ({"job.yaml": yours}, {"job.yaml.new": new})
    taken = regenerated_over_adopted(yours, new, "job.yaml", Decision.NEW)
    assert taken.beside == {"job.yaml.bak": yours}
    assert "extra: 1" in taken.files["job.yaml"]


def test_an_adopted_file_that_is_no_object_is_one_conflict() -> None:
    found = regenerated_over_adopted("[1]\n", '{"a": 1}\n', "ds_config.json")
    assert [each.clash.pointer for each in found.open] == [()]
    assert regenerated_over_adopted("[1]\n", '{"a": 1}\n', "ds_config.json", Decision.NEW).files == {
        "ds_config.json": '{"a": 1}\n'
    }


def test_no_host_is_added_to_an_adopted_hostfile_unasked() -> None:
    found = regenerated_over_adopted("a slots=8\n", "a slots=4\nCHANGE-ME-1 slots=4\n", "hostfile")
    assert found.files["hostfile"] == "a slots=8\n"
    assert len(found.open) == 2


@pytest.mark.parametrize(("base", "is_adopted"), [("a: 7\n", True), ("a: 1\n", False)])
def test_force_keeps_what_stood_there(base: str, is_adopted: bool) -> None:
    name = "job.yaml"
    file = Standing(name=name, shown=name, base=base, yours="a: 7\n", new="a: 2\n", is_adopted=is_adopted)
    found = replaced([file])
    assert (dict(found.files), dict(found.beside)) == ({name: "a: 2\n"}, {"job.yaml.bak": "a: 7\n"})


def test_an_open_conflict_remembers_what_stood_there_before_it() -> None:
    first = of("a: 1\n", "a: 7\n", "a: 2\n")
    opened = first.unsettled["job.yaml"]
    asked = Standing(
        name="job.yaml", shown="job.yaml", base="a: 2\n", yours="a: 7\n", new="a: 2\n", unsettled=opened, reopens=True
    )
    later = regenerate([replace(asked, new="a: 3\n", reopens=False)], lambda file, clash: Decision.OPEN)
    again = regenerate([asked], lambda file, clash: Decision.KEEP)
    assert [each.clash.base for each in (*again.conflicts, *later.conflicts)] == [1, 1]
    assert (again.unsettled, later.unsettled) == ({}, {"job.yaml": opened})


def test_a_conflict_that_you_settled_by_hand_is_open_no_longer() -> None:
    opened = (Unsettled(pointer=("a",), base=(1,)),)
    file = Standing(
        name="job.yaml",
        shown="job.yaml",
        base="a: 2\nb: 1\n",
        yours="a: 2\nb: 9\n",
        new="a: 2\nb: 1\n",
        unsettled=opened,
    )
    assert regenerate([file], lambda file, clash: Decision.OPEN).unsettled == {}


def test_a_new_file_of_yours_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml.new").write_text("mine\n")
    opened = replace(lock("a: 2\n"), unsettled={"job.yaml": (Unsettled(pointer=("a",)),)})
    first = write_files(tmp_path, opened, {"job.yaml": "a: 7\n"}, {"job.yaml.new": "a: 2\n"}, before=lock("a: 1\n"))
    assert first == ["job.yaml", "job.yaml.new2"]
    later = replace(opened, base={"job.yaml": "a: 3\n"})
    assert write_files(tmp_path, later, {"job.yaml": "a: 7\n"}, {}, before=opened) == ["job.yaml.new2"]
    write_files(tmp_path, lock("a: 3\n"), {"job.yaml": "a: 3\n"}, {}, before=later)
    assert sorted(path.name for path in tmp_path.glob("job*")) == ["job.yaml", "job.yaml.new"]
    assert (tmp_path / "job.yaml.new").read_text() == "mine\n"


@pytest.mark.parametrize("edited", ["a: 2\n# looked at\n", "a: 2\r\n"])
def test_a_new_file_that_you_edited_stays(edited: str, tmp_path: Path) -> None:
    opened = replace(lock("a: 2\n"), unsettled={"job.yaml": (Unsettled(pointer=("a",)),)})
    write_files(tmp_path, opened, {"job.yaml": "a: 7\n"}, {"job.yaml.new": "a: 2\n"}, before=lock("a: 1\n"))
    (tmp_path / "job.yaml.new").write_bytes(edited.encode())
    write_files(tmp_path, lock("a: 2\n"), {"job.yaml": "a: 7\n"}, {}, before=opened)
    assert (tmp_path / "job.yaml.new").read_bytes() == edited.encode()


def test_a_folder_where_a_copy_would_stand_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job.yaml.bak").mkdir()
    names = write_files(tmp_path, lock("a: 2\n"), {"job.yaml": "a: 2\n"}, {"job.yaml.bak": "a: 1\n"})
    assert names == ["job.yaml", "job.yaml.bak2"]


def test_an_anchor_that_two_keys_share_is_no_place_for_an_edit() -> None:
    yours = "seq_len: &s 4096\nsave_steps: *s\n"
    with pytest.raises(InvalidConfig, match="cannot be changed without changing other keys") as caught:
        of("seq_len: 4096\nsave_steps: 500\n", yours, "seq_len: 1024\nsave_steps: 500\n")
    assert "--force" in str(caught.value.hint)
