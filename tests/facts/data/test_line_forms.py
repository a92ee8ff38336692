"""Files that are no JSON lines: named as what they are, with a command that makes JSON lines of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import check
from dstrain.facts.data.formats import Reading

ROWS = [{"instruction": "Say {'a'}, ok?", "output": 'It\'s "a",\n{b}'}, {"instruction": "c", "output": "d"}]
LINES = [json.dumps(row) for row in ROWS]
FORMS = {
    "pretty": ("\n".join(json.dumps(row, indent=2) for row in ROWS), "several lines"),
    "pretty with commas": (",\n".join(json.dumps(row, indent=2) for row in ROWS), "several lines"),
    "commas": (",\n".join(LINES) + "\n", "a comma"),
    "one line": (" ".join(LINES), "several objects"),
    "Python's dicts": ("\n".join(map(repr, ROWS)) + "\n", "single quotes"),
    "Python's list": (repr(ROWS), "single quotes"),
    "texts": ("\n".join(map(json.dumps, LINES)), "is a string"),
    "rows of an object": (json.dumps({"data": ROWS}, indent=1), 'the rows are in "data"'),
}


def refusal(path: Path) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as raised:
        check(path, Reading())
    return raised.value


@pytest.mark.parametrize("name", FORMS)
def test_the_command_that_is_advised_makes_the_same_rows(name: str, tmp_path: Path) -> None:
    text, problem = FORMS[name]
    path = tmp_path / "my rows.jsonl"
    path.write_text(text)
    error = refusal(path)
    assert problem in error.problem.split("\n")[0]
    assert error.hint is not None
    subprocess.run(error.hint.split("\n")[0].partition(": ")[2], shell=True, check=True)
    fixed = tmp_path / "fixed-my rows.jsonl"
    assert [json.loads(line) for line in fixed.read_text().splitlines()] == ROWS
    assert check(fixed, Reading()).rows_checked == len(ROWS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS"),
        (b"<!DOCTYPE html>\n<html>", "a web page"),
        ('{"text": "a"}\n'.encode("utf-16"), "UTF-16"),
        (b'{"text": "a"}\n{"text": "b', ":2: the file ends in the middle of this row"),
        (b"<<<<<<< HEAD\n", "merge conflict"),
        (b'{"text": %s}\n' % (b"1" * 5000), ":1: Exceeds the limit"),
    ],
)
def test_other_kinds_are_named(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert problem in refusal(path).problem
