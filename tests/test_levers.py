"""The page of levers has what `benchmarks/levers.py` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.levers import PAIRS, WIDTH, table

PAGES = [Path(__file__).resolve().parents[1] / "docs" / name for name in ("levers.md", "zh/levers.md")]


@pytest.mark.parametrize("words", PAIRS[:1])
def test_the_pages_have_the_figures_of_today(words: str) -> None:
    lines = table(words)
    assert all(len(line) <= WIDTH for line in lines)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "\n".join(lines) in text, "python benchmarks/levers.py, and paste what it prints"
        assert text.count("tok/s off") == len(PAIRS)
