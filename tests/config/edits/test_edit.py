"""Edits in place: the text parses to the edited value, and what people wrote around it stays."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.config.edits import edit
from dstrain.config.edits.regenerate import merge
from dstrain.config.jsonc import REMOVED, Change, Mark, applied, read
from dstrain.errors import InvalidConfig

_KEYS = st.sampled_from(["a", "b", "c", "d", "stage", 'q"x', "名"])
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from([0.5, 1e-5, "x", "// no", 'a"#', "auto"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(_KEYS, _VALUES, max_size=5)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A JSON text as people may write it, and the comments in it."""
    comments: list[str] = []
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    is_dense = draw(st.booleans())

    def gap(least: str = "") -> str:
        if draw(st.integers(0, 9)) < 6:
            return least
        number = len(comments)
        kinds = (
            [f"/* c{number} */"]
            if is_dense
            else [f"// c{number}", f"# c{number}", f"/* c{number} */", f"/* c{number}\n */"]
        )
        comments.append(draw(st.sampled_from(kinds)))
        lead = draw(st.sampled_from(["", " ", newline, newline + "  "]))
        return lead + comments[-1] + (newline if comments[-1][0] != "/" or comments[-1][1] == "/" else "") + least

    def text(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or not value:
            return json.dumps(value, ensure_ascii=False)
        inner, outer = ("", "") if is_dense else (newline + "  " * (depth + 1), newline + "  " * depth)
        members = [
            f"{json.dumps(key, ensure_ascii=False)}{gap()}:{gap(' ')}{text(each, depth + 1)}{gap()}"
            for key, each in value.items()
        ]
        body = "".join(
            gap(inner) + member + ("," if order < len(members) - 1 or draw(st.booleans()) else "")
            for order, member in enumerate(members)
        )
        return "{" + body + gap(outer) + "}"

    bom = draw(st.sampled_from(["", "\ufeff"]))
    return bom + gap() + text(draw(OBJECTS), 0) + gap() + draw(st.sampled_from(["", newline])), comments


@given(documents(), OBJECTS)
def test_the_text_parses_to_the_merged_value(document: tuple[str, list[str]], new: dict[str, Any]) -> None:
    text, _ = document
    base = read(text, "x").value
    merged = merge(base, base, new)
    assert read(edit.apply(text, "x.json", merged.changes), "x").value == new


@given(documents(), OBJECTS)
def test_comments_outside_of_what_is_replaced_survive(document: tuple[str, list[str]], new: dict[str, Any]) -> None:
    text, comments = document
    parsed = read(text, "x")
    changes = merge(parsed.value, parsed.value, new).changes
    gone = [parsed.spans[each.pointer] for each in changes if each.pointer in parsed.spans]
    edited = edit.apply(text, "x.json", changes)
    for comment in comments:
        at = text.index(comment)
        if not any(span.key <= at < span.end for span in gone):
            assert comment in edited


@given(documents(), OBJECTS)
def test_line_ends_and_a_byte_order_mark_stay(document: tuple[str, list[str]], new: dict[str, Any]) -> None:
    text, _ = document
    base = read(text, "x").value
    edited = edit.apply(text, "x.json", merge(base, base, new).changes)
    assert edited.startswith("\ufeff") == text.startswith("\ufeff")
    if "\r\n" in text and not re.search(r"[^\r]\n", text):
        assert not re.search(r"[^\r]\n", edited)


@given(documents(), OBJECTS)
def test_no_trailing_comma_appears_that_was_not_there(document: tuple[str, list[str]], new: dict[str, Any]) -> None:
    text, _ = document
    parsed = read(text, "x")
    edited = edit.apply(text, "x.json", merge(parsed.value, parsed.value, new).changes)
    if "a trailing comma" not in parsed.extras:
        assert "a trailing comma" not in read(edited, "x").extras


@given(documents())
def test_a_key_can_be_renamed_anywhere(document: tuple[str, list[str]]) -> None:
    text, comments = document
    value = read(text, "x").value
    for pointer in [each for each in read(text, "x").spans if each and isinstance(each[-1], str)]:
        change = Change(pointer=pointer, renamed="renamed")
        edited = edit.apply(text, "x.json", [change])
        assert read(edited, "x").value == applied(value, [change])
        assert all(comment in edited for comment in comments)


FILE = """{
  "train_batch_size": "auto", // the Trainer's
  // ZeRO
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true  // faster
  }
}
"""


def change(*pointer: str, value: Any = None, **more: Any) -> list[Change]:
    return [Change(pointer=pointer, value=value, **more)]


@pytest.mark.parametrize(
    ("text", "changes", "edited"),
    [
        (FILE, change("zero_optimization", "stage", value=2), FILE.replace("3", "2")),
        (FILE, change("zero_optimization", "overlap_comm", value=REMOVED), FILE.replace(
            '3,\n    "overlap_comm": true  // faster', "3\n    // faster")),
        (FILE, change("zero_optimization", "stage", value=REMOVED), FILE.replace('    "stage": 3,\n', "")),
        (FILE, change("zero_optimization", "x", value=1), FILE.replace(
            "true  // faster", 'true,  // faster\n    "x": 1')),
        (FILE, change("zero_optimization", "x", value=1, after=("stage",)), FILE.replace("3,", '3,\n    "x": 1,')),
        (FILE, change("x", value={"y": [1]}, after=("train_batch_size", "other")), FILE.replace(
            "Trainer's\n", 'Trainer\'s\n  "x": {\n    "y": [\n      1\n    ]\n  },\n')),
        (FILE, change("x", value=1, after=()), FILE.replace("{\n", '{\n  "x": 1,\n', 1)),
        ('{"a": 1, "b": 2}', change("b", value=REMOVED), '{"a": 1}'),
        ('{"a": 1, "b": 2}', change("a", value=REMOVED), '{"b": 2}'),
        ('{"a": 1, "b": 2}', change("c", value={"d": 1}), '{"a": 1, "b": 2, "c": {"d": 1}}'),
        ('{"a": 1,}', change("b", value=2), '{"a": 1, "b": 2,}'),
        ('{\n\t"a": {}\n}', change("a", "b", value=1), '{\n\t"a": {\n\t\t"b": 1\n\t}\n}'),
        ('{\r\n "a": 1\r\n}', change("b", value=1), '{\r\n "a": 1,\r\n "b": 1\r\n}'),
        ("{}", change("a", "b", value=1), '{\n  "a": {\n    "b": 1\n  }\n}'),
        ('{"a": 1, "a": 2}', change("a", value=REMOVED), "{}"),
        ('{"a": 1, "a": 2}', change("a", renamed="b", value=3), '{"b": 3}'),
        ('{"a": [0.9, 0.95]}', change("a", value=[1, 2]), '{"a": [1, 2]}'),
        ('{"a": 1\n , "b": 2\n}', change("b", value=REMOVED), '{"a": 1\n}'),
        ('{"a": 1} // end', change(value=[1]), "[1] // end"),
    ],
)  # fmt: skip
def test_json_is_edited_in_place(text: str, changes: list[Change], edited: str) -> None:
    assert edit.apply(text, "ds_config.json", changes) == edited


def test_a_name_that_stands_already_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x\.json:1:10"):
        edit.apply('{"a": 1, "b": 2}', "x.json", [Change(pointer=("a",), renamed="b")])


# --- YAML

_NAMES = st.sampled_from(["model", "seq_len", "lora", "a-b", "on", "名", "x y"])
_PLAINS = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from([0.5, 1e-5, "x", "# no", "a: b", "", "auto"])
)
_LISTS = st.lists(_PLAINS, max_size=3)
JOBS = st.dictionaries(
    _NAMES, st.one_of(_PLAINS, _LISTS, st.dictionaries(_NAMES, st.one_of(_PLAINS, _LISTS), max_size=3)), max_size=5
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A YAML text as people may write it, and the comments in it."""
    comments: list[str] = []
    newline = draw(st.sampled_from(["\n", "\r\n"]))

    def comment(lead: str) -> str:
        if draw(st.booleans()):
            return ""
        comments.append(f"# c{len(comments)}.")
        return lead + comments[-1]

    def lines(value: dict[str, Any], indent: str) -> str:
        text = ""
        for key, each in value.items():
            text += f"{own}{newline}" if (own := comment(indent)) else ""
            text += draw(st.sampled_from(["", newline]))
            name = f"{indent}{key if key.isascii() and ' ' not in key and key != 'on' else json.dumps(key)}:"
            if isinstance(each, dict) and each and draw(st.booleans()):
                text += name + comment("  ") + newline + lines(each, indent + "  ")
            elif isinstance(each, list) and each and draw(st.booleans()):
                dashes = draw(st.sampled_from(["", "  "]))
                items = [f"{indent}{dashes}- {json.dumps(item)}{newline}" for item in each]
                text += name + comment("  ") + newline + "".join(items)
            else:
                plain = draw(st.sampled_from(["", " ~"])) if each is None else f" {json.dumps(each)}"
                text += name + plain + comment("  ") + newline
        return text

    text = comment("") + newline + lines(draw(JOBS), "")
    return draw(st.sampled_from(["", "\ufeff"])) + text, comments


@given(jobs(), JOBS)
def test_a_job_parses_to_the_merged_value_and_keeps_its_comments(document: tuple[str, list[str]], new: Any) -> None:
    text, comments = document
    base = edit.read(text, "job.yaml")
    changes = merge(base, base, new).changes
    edited = edit.apply(text, "job.yaml", changes)
    assert edit.read(edited, "job.yaml") == new
    gone = {each.pointer for each in changes if isinstance(each.value, (Mark, list))}
    if not gone and not any(isinstance(each, dict) for each in [*base.values(), *new.values()]):
        assert all(comment in edited for comment in comments)


@pytest.mark.parametrize(
    ("text", "changes", "edited"),
    [
        ("a: 1  # one\nb: 2\n", change("a", value=2), "a: 2  # one\nb: 2\n"),
        ("a: 1  # one\nb: 2\n", change("a", value=2, comment="two"), "a: 2  # two\nb: 2\n"),
        ("a: 1  # one\nb: 2\n", change("a", value=2, comment=""), "a: 2\nb: 2\n"),
        ("a: 1\nb: 2\n", change("a", value=2, comment="new"), "a: 2  # new\nb: 2\n"),
        ("a: 1  # one\nb: 2\n", change("a", value=REMOVED), "# one\nb: 2\n"),
        ("a: 1\n\n# tail\n", change("b", value="x"), 'a: 1\nb: "x"\n\n# tail\n'),
        ("# head\na: 1\n", change("b", value=1, after=()), "# head\nb: 1\na: 1\n"),
        ("a:\n  b: 1  # one\nc: 2", change("a", "d", value=[1]), "a:\n  b: 1  # one\n  d: [1]\nc: 2"),
        ("a:\n  b: 1\nc: 2\n", change("a", "b", value=REMOVED), "a: {}\nc: 2\n"),
        ("a:\n  - x\n  - y\nc: 2\n", change("a", value=["z"]), 'a: ["z"]\nc: 2\n'),
        ("env: {A: 1, B: 2}  # e\n", change("env", "A", value=REMOVED), "env: {B: 2}  # e\n"),
        ("env: {A: 1, B: 2}\n", change("env", "B", value=REMOVED), "env: {A: 1}\n"),
        ("env: {}\n", change("env", "A", value="x"), 'env: {A: "x"}\n'),
        ("a:\nb: 2\n", change("a", value=1), "a: 1\nb: 2\n"),
        ("a: 1\n", change("lora", value={"rank": 8, "t": []}), "a: 1\nlora:\n  rank: 8\n  t: []\n"),
        ("a: 1\r\nb: 2\r\n", change("c", value=3), "a: 1\r\nb: 2\r\nc: 3\r\n"),
        ("a: 1\n", [Change(pointer=("a",), renamed="b")], "b: 1\n"),
        ("# nothing\n", change("a", value=1), "# nothing\na: 1\n"),
    ],
)
def test_yaml_is_edited_in_place(text: str, changes: list[Change], edited: str) -> None:
    assert edit.apply(text, "job.yaml", changes) == edited


def test_an_anchor_that_two_keys_share_is_not_changed_for_both() -> None:
    with pytest.raises(InvalidConfig, match=r"job\.yaml: a\.c cannot be changed"):
        edit.apply("a: &x {c: 1}\nb: *x\n", "job.yaml", change("a", "c", value=2))


# --- hostfile

HOSTS = st.dictionaries(st.sampled_from(["gpu01", "gpu02", "10.0.0.1", "u@h", "b"]), st.integers(1, 8), min_size=1)


@given(HOSTS, HOSTS, st.sampled_from(["\n", "\r\n"]))
def test_a_hostfile_parses_to_the_merged_hosts_and_keeps_its_comments(base: Any, new: Any, newline: str) -> None:
    lines = [f"# rack of {host}{newline}{host}  slots={slots}" for host, slots in base.items()]
    text = newline.join(lines)
    edited = edit.apply(text, "hostfile", merge(base, base, new).changes)
    assert edit.read(edited, "hostfile") == new
    assert all(f"# rack of {host}" in edited for host in base)


def test_an_added_host_stands_where_it_is_generated() -> None:
    changes = merge({"a": 8, "c": 8}, {"a": 8, "c": 8}, {"a": 8, "b": 8, "c": 8}).changes
    assert edit.apply("a slots=8\nc slots=8", "hostfile", changes) == "a slots=8\nb slots=8\nc slots=8"
