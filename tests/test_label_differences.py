"""The pages of labels have what `benchmarks/labels.py` found, and only decided differences count as decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.label_differences import decided

ROOT = Path(__file__).resolve().parents[1]
RESULT: dict[str, Any] = json.loads((ROOT / "benchmarks/results/labels.json").read_text(encoding="utf-8"))
PAGES = {"en": "docs/labels.md", "zh": "docs/zh/labels.md"}


@pytest.mark.parametrize("formatting", ["sharegpt", "openai"])
def test_a_page_has_the_number_of_conversations_with_equal_tokens(formatting: str) -> None:
    rows = RESULT["tables"][f"llamafactory {formatting}"].values()
    equal, count = sum(row["tokens"] for row in rows), len(rows) * len(RESULT["conversations"])
    texts = {language: (ROOT / page).read_text(encoding="utf-8") for language, page in PAGES.items()}
    assert f"{equal} of {count}" in texts["en"]
    assert f"{count} 个中的 {equal} 个" in texts["zh"]


@pytest.mark.parametrize("tool", RESULT["tables"])
def test_every_difference_is_decided(tool: str) -> None:
    for row in RESULT["tables"][tool].values():
        assert row["undecided"] == []
        assert row["decided"] + row["refused"] == len(RESULT["conversations"])


@pytest.mark.parametrize(
    ("ours", "theirs", "kinds"),
    [
        ("Four.<|im_end|>", "Four.<|im_end|>", ()),
        ("Four.<|im_end|>", "Four.<|im_end|>\n", ("line break",)),
        ("Four.<|user|>", "Four.<|endoftext|>", ("end",)),
        ("Four.<|im_end|>", "<think>\n\n</think>\n\nFour.<|im_end|>\n", ("empty thoughts", "line break")),
        ("<think>\nAdd.\n</think>\n\nFour.", "Four.", ("thoughts",)),
        ("<think>\nAdd.\n</think>\n\nFour.", "<think>\nGuess.\n</think>\n\nFour.", None),
        ("Four.<|im_end|>", "Five.<|im_end|>", None),
        ("Four.<|im_end|>", "Four.", None),
        ("Four.", "user\nTwo?Four.", None),
    ],
)
def test_a_difference_is_decided_or_not(ours: str, theirs: str, kinds: tuple[str, ...] | None) -> None:
    assert decided([ours], [theirs], ()) == kinds


def test_the_form_of_a_call_hides_no_difference_in_an_answer() -> None:
    calls = {0}
    assert decided(["<tool_call>", "Sun."], ["Action:", "Sun."], calls) == ("form of a call",)
    assert decided(["<tool_call>", "Sun."], ["Action:", "Rain."], calls) is None
    assert decided(["<tool_call>", "Sun."], ["Sun."], calls) is None
