"""What holds for any text: lint never crashes, and --fix is idempotent and never makes a file worse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.config.jsonc import Change, applied
from dstrain.config.keys import KEYS, Kind
from dstrain.config.lint.engine import check, fixed, read
from dstrain.config.lint.rule import Subject
from dstrain.findings import Finding, Severity, lines
from tests.config.lint.case import Case
from tests.config.lint.cases_engine import ENGINE_CASES
from tests.config.lint.cases_text import TEXT_CASES

pytestmark = pytest.mark.sweep

PATHS = sorted(path for path in KEYS if "*" not in path)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
VALUES: st.SearchStrategy[Any] = (
    st.sampled_from(["auto", "3", "true", 0, 1, 2, 3, -1, 5.5, 1e14, True, False, None, "cpu", "nvme", {}]) | JUNK
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a configuration of real keys, some misspelt, with values of any kind."""
    config: dict[str, Any] = {"zero_optimization": {"stage": draw(st.sampled_from([0, 1, 2, 3, "3", 7]))}}
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=8)):
        node = config
        for part in path[:-1]:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):
                break
            node = inner
        name = path[-1] if draw(st.integers(0, 4)) else path[-1][:-1] + "x"
        if KEYS[path].kind is not Kind.OBJECT or draw(st.booleans()):
            node[name] = draw(VALUES)
    return config


def subject(text: str, *, is_trainers: bool = True) -> Subject | None:
    document, _ = read(text, "x.json")
    return None if document is None else Subject(document=document, is_trainers=is_trainers)


def count(findings: list[Finding], severity: Severity) -> int:
    return sum(finding.severity is severity for finding in findings)


@given(configs(), st.booleans())
def test_any_configuration_is_checked_and_fixed_for_good(config: dict[str, Any], is_trainers: bool) -> None:
    given_ = subject(json.dumps(config, indent=2), is_trainers=is_trainers)
    assert given_ is not None
    before = check(given_)
    after, _ = fixed(given_)
    again, mended = fixed(after)
    assert (again.document.text, mended) == (after.document.text, [])
    assert count(check(after), Severity.ERROR) <= count(before, Severity.ERROR)


@pytest.mark.parametrize("case", [*TEXT_CASES, *ENGINE_CASES], ids=lambda case: case.name)
def test_a_mistake_with_one_safe_answer_is_mended_and_not_found_again(case: Case) -> None:
    found = subject(case.source, is_trainers=case.is_trainers)
    if found is None:
        return
    (finding,) = [each for each in check(found) if each.rule == case.rule]
    after, mended = fixed(found)
    left = check(after)
    assert {(each.rule, each.pointer) for each in left}.isdisjoint((each.rule, each.pointer) for each in mended)
    if finding.changes:
        assert case.rule in [each.rule for each in mended]
        assert case.rule not in [each.rule for each in left]


@given(JUNK)
def test_any_json_is_checked(value: object) -> None:
    found = subject(json.dumps(value))
    if found is not None:
        check(found)


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", errors="replace")))
def test_any_text_is_checked_or_refused_with_a_place(text: str) -> None:
    document, findings = read(text, "x.json")
    assert (document is None) == (len(findings) == 1)
    if document is not None:
        check(Subject(document=document, is_trainers=True))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"b": 1, "b": 2}, "a": 3}',
        '{"zero_optimization": {"stage": 1, "stage": 2}, "zero_optimization": {}}',
        '{"bf16": [], "fp16": 1, "optimizer": "x", "zero_optimization": [{}]}',
    ],
)
def test_keys_inside_keys_that_stand_again_are_checked(text: str) -> None:
    found = subject(text)
    assert found is not None
    assert check(found)


@pytest.mark.parametrize("name", ["zero_optimization", "gradient_clipping", "gradient_accumulation_steps"])
def test_a_key_with_a_typo_is_not_missing_too(name: str) -> None:
    keys = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 3}}
    typo = name.replace("iz", "is").replace("cc", "c").replace("pp", "p")
    found = subject(json.dumps(keys).replace(f'"{name}"', f'"{typo}"'))
    assert found is not None
    assert {finding.rule for finding in check(found)} - {"DS404", "DS601"} == {"DS101"}


def test_a_key_that_goes_for_one_that_is_there_is_only_removed() -> None:
    rows = [(path, row) for path, row in KEYS.items() if (row.instead or "").startswith("write ") and "*" not in path]
    assert len(rows) > 10
    for path, row in rows:
        words = re.findall(r"[a-z]\w*(?:\.\w+)*", row.instead or "")
        named = [key for key in (tuple(word.split(".")) for word in words) if key in KEYS]
        assert named, path
        config: dict[str, Any] = {}
        for key in (path, *named):
            config = applied(config, [Change(pointer=key, value=True)])
        found = subject(json.dumps(config))
        assert found is not None
        at = [each for each in check(found) if each.pointer == f"/{'/'.join(path)}" and each.rule in ("DS104", "DS105")]
        assert all(each.fix.startswith("remove it: ") for each in at), at
        assert at or path[-2:-1] == ("params",) or row.alias_of is not None, path


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"gradient_cliping": 1.0, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}', "DS101"),
        ('{"overlap_comm": true, "zero_optimization": {"stage": 2, "overlap_comm": true}}', "DS102"),
    ],
)
def test_a_name_that_means_a_key_that_is_there_says_so(text: str, rule: str) -> None:
    found = subject(text, is_trainers=False)
    assert found is not None
    assert [each.fix.endswith("remove one of the two") for each in check(found) if each.rule == rule] == [True]


def test_fixes_leave_every_other_byte_alone() -> None:
    text = (
        '{\r\n  // mine\r\n  "gradient_acumulation_steps": "auto", /* eight */\r\n'
        '  "zero_optimization": {"stage": "2"},}'
    )
    found = subject(text)
    assert found is not None
    after, mended = fixed(found, ignored=("DS402",))
    assert [each.rule for each in mended] == ["DS101", "DS111"]
    assert after.document.text == text.replace("gradient_acumulation", "gradient_accumulation").replace('"2"', "2")


@pytest.mark.parametrize(
    "name", ["micro_batch_size", "per_device_train_batch_size", "eval_batch_size", "batch_size", "monitor", "comment"]
)
def test_another_word_is_not_taken_for_a_slip(name: str) -> None:
    found = subject(f'{{"{name}": 4, "zero_optimization": {{"stage": 2}}}}', is_trainers=False)
    assert found is not None
    assert name in fixed(found)[0].config


def test_what_a_file_holds_does_not_steer_a_terminal() -> None:
    found = subject('{"\\u001b[31mred": 1, "x\\ny": 2}')
    assert found is not None
    said = "\n".join(line for finding in check(found) for line in lines(finding))
    assert "\x1b" not in said
    assert "\\x1b[31mred" in said
