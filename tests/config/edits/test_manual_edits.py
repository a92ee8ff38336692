"""Manual edits are told from what was generated."""

from __future__ import annotations

from pathlib import Path

from dstrain.config.edits.lock import Lock, write_files
from dstrain.config.edits.regenerate import document, edits_in, manual_edits, of_run, without_secrets
from dstrain.config.jsonc import REMOVED


def generate(folder: Path, **files: str) -> Lock:
    texts = {name.replace("__", "."): text for name, text in files.items()}
    lock = Lock(dstrain="0", deepspeed="0", base=texts)
    write_files(folder, lock, texts, {})
    return lock


def test_each_changed_key_is_an_edit(tmp_path: Path) -> None:
    lock = generate(tmp_path, ds_config__json='{"a": 1, "b": {"c": 1}}', hostfile="x slots=8\n")
    (tmp_path / "ds_config.json").write_text('{"b": {"c": 2, "d": 3}} // mine')
    found = [(each.file, each.pointer, each.base, each.yours) for each in manual_edits(tmp_path, lock)]
    assert found == [
        ("ds_config.json", ("b", "c"), 1, 2),
        ("ds_config.json", ("b", "d"), REMOVED, 3),
        ("ds_config.json", ("a",), 1, REMOVED),
    ]


def test_a_value_that_is_not_there_has_no_key_in_json() -> None:
    found = document(edits_in("job.yaml", "a: 1\n", "b: 2\n"))
    assert found == [
        {"file": "job.yaml", "key": "b", "pointer": ["b"], "yours": 2},
        {"file": "job.yaml", "key": "a", "pointer": ["a"], "base": 1},
    ]


def test_a_run_knows_the_edits_of_its_own_files_alone(tmp_path: Path) -> None:
    generate(tmp_path, job__yaml="a: 1\n", hostfile="x slots=8\n")
    (tmp_path / "job.yaml").write_text("a: 2\n")
    (tmp_path / "hostfile").write_text("x slots=4\n")
    found = of_run([tmp_path / "job.yaml", tmp_path / "ds_config.json"])
    assert found is not None
    assert [(each.file, each.base, each.yours) for each in found] == [("job.yaml", 1, 2)]


def test_without_a_lock_nothing_is_known(tmp_path: Path) -> None:
    assert of_run([tmp_path / "job.yaml"]) is None


def test_secrets_are_left_out() -> None:
    added = edits_in("job.yaml", "a: 1\n", "a: 1\nenv: {KEY: s, N: 1}\n")
    changed = edits_in("job.yaml", "env: {KEY: s}\n", "env: {KEY: t}\n")
    assert document(without_secrets([*added, *changed], {"KEY"})) == [
        {"file": "job.yaml", "key": "env", "pointer": ["env"], "yours": {"N": "1"}}
    ]
