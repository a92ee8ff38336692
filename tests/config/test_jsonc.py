"""The tolerant JSON reader: what it forgives, what it refuses, and where."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.config.jsonc import parse
from dstrain.errors import InvalidConfig

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 2]))
def test_what_json_writes_is_read_back(value: object, indent: int | None) -> None:
    assert parse(json.dumps(value, indent=indent), "x").value == value


@given(st.text())
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        parse(text, "x")
    except InvalidConfig as error:
        assert error.problem.startswith("x:")


@pytest.mark.parametrize(
    "text", ['\ufeff{"a": 1}', '{"a": 1,}', '{/* c */ "a": 1}', '{"a": 1} // end', '# note\n{"a": 1}']
)
def test_bom_comments_and_trailing_commas_are_forgiven(text: str) -> None:
    assert parse(text, "x").value == {"a": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n "b": flase}', "x:2:7: 'flase' is not a JSON value"),
        ('{"a": 1\n "b": 2}', "x:2:2: missing comma or }"),
        ('{"a": 1, "a": 2}', 'x:1:10: the key "a" is repeated (first on line 1)'),
        ('{"a": "x', "x:1:7: this string is not closed"),
        ("{'a': 1}", "x:1:2: expected a key in double quotes"),
        ("", "x:1:1: the file ends here"),
        ("{} {}", "x:1:4: unexpected text after the end"),
        ('{"a": 1e999}', "x:1:7: this number is too large"),
        ("9" * 5000, "x:1:1: this number is too large"),
        ('{"a": 1' + "0" * 400 + "}", "x:1:7: "),
        ("1٣", "x:1:2: unexpected text after the end"),
        ("[" * 5000, "x:1:102: this value is nested more than 100 levels deep"),
        ('{"a":' * 5000, "x:1:506: this value is nested more than 100 levels deep"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse(text, "x")
    assert caught.value.problem.startswith(problem)


def test_every_key_knows_its_place() -> None:
    document = parse('{\n  "zero": {\n    "stage": "3"\n  }\n}', "c.json")
    assert str(document.place(("zero", "stage"))) == "c.json:3:5"
