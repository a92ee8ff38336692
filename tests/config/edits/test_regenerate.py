"""Three-way merges: what nobody touched follows dstrain, what you touched stays, what both touched is a conflict."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.config.edits.regenerate import merge, settled
from dstrain.config.jsonc import REMOVED, Change, applied, lookup, same

_KEYS = st.sampled_from("abcd")
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(0, 2), st.just("auto"), st.lists(st.integers(0, 2), max_size=2)
)
_VALUES = st.recursive(_LEAVES, lambda inner: st.dictionaries(_KEYS, inner, max_size=3), max_leaves=6)
OBJECTS = st.dictionaries(_KEYS, _VALUES, max_size=4)


def merged(base: Any, yours: Any, new: Any) -> Any:
    return applied(yours, merge(base, yours, new).changes)


@given(OBJECTS, OBJECTS)
def test_what_dstrain_does_not_change_stays_yours(base: Any, yours: Any) -> None:
    assert merge(base, yours, base).conflicts == ()
    assert same(merged(base, yours, base), yours)


@given(OBJECTS, OBJECTS)
def test_what_you_did_not_change_becomes_new(base: Any, new: Any) -> None:
    assert merge(base, base, new).conflicts == ()
    assert same(merged(base, base, new), new)


@given(OBJECTS, OBJECTS, OBJECTS)
def test_merging_again_changes_nothing(base: Any, yours: Any, new: Any) -> None:
    once = merged(base, yours, new)
    assert merge(base, once, new).changes == ()
    assert merge(new, once, new).changes == ()
    assert merge(new, once, new).conflicts == ()


@given(OBJECTS, OBJECTS, OBJECTS)
def test_a_conflict_keeps_your_value_and_can_be_given_the_new_one(base: Any, yours: Any, new: Any) -> None:
    found = merge(base, yours, new)
    kept = applied(yours, found.changes)
    taken = applied(kept, [settled(each, new) for each in found.conflicts])
    for each in found.conflicts:
        assert same(lookup(kept, each.pointer), each.yours)
        assert same(lookup(taken, each.pointer), each.new)


@pytest.mark.parametrize(
    ("base", "yours", "new", "result", "conflicts"),
    [
        ({"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}, []),
        ({"a": 1}, {"a": 3}, {"a": 1}, {"a": 3}, []),
        ({"a": 1}, {"a": 3}, {"a": 2}, {"a": 3}, [("a",)]),
        ({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}, []),
        ({"a": 1}, {}, {"a": 1}, {}, []),
        ({"a": 1}, {}, {"a": 2}, {}, [("a",)]),
        ({"a": 1}, {"a": 1}, {}, {}, []),
        ({"a": 1}, {"a": 2}, {}, {"a": 2}, [("a",)]),
        ({}, {"a": 1}, {"a": 2}, {"a": 1}, [("a",)]),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1, 3]}, {"a": [1, 2]}, [("a",)]),
        ({"a": {"b": 1, "c": 1}}, {"a": {"b": 2, "c": 1}}, {"a": {"b": 1, "c": 2}}, {"a": {"b": 2, "c": 2}}, []),
        ({"a": {"b": 1, "c": 1}}, {"a": {"b": 2, "c": 1}}, {}, {"a": {"b": 2, "c": 1}}, [("a",)]),
        ({"a": 1}, {"a": True}, {"a": 1}, {"a": True}, []),
        ({"a": 500000000}, {"a": 5e8}, {"a": 1}, {"a": 1}, []),
    ],
)
def test_each_case(base: Any, yours: Any, new: Any, result: Any, conflicts: list[Any]) -> None:
    found = merge(base, yours, new)
    assert [each.pointer for each in found.conflicts] == conflicts
    assert same(applied(yours, found.changes), result)


def test_an_open_conflict_comes_again_only_when_asked_for() -> None:
    base, yours = {"a": 2}, {"a": 3}
    assert merge(base, yours, base).conflicts == ()
    again = merge(base, yours, base, unsettled={("a",): 1}).conflicts
    assert [(each.base, each.yours) for each in again] == [(1, 3)]
    assert merge(base, yours, base, unsettled={("a",): 1}, reopens=False).conflicts == ()


def test_an_added_key_knows_what_stands_before_it() -> None:
    changes = merge({"a": 1, "c": 1}, {"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}).changes
    assert changes == (Change(pointer=("b",), value=1, after=("a",)),)


def test_removing_what_is_not_there_does_nothing() -> None:
    assert applied({"a": 1}, [Change(pointer=("b", "c"), value=REMOVED)]) == {"a": 1}


@pytest.mark.parametrize("section", [None, True, 3, "x"])
def test_a_key_in_what_is_no_object_makes_an_object_of_it(section: object) -> None:
    assert applied({"a": section}, [Change(pointer=("a", "b"), value=1)]) == {"a": {"b": 1}}
