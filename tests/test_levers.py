"""The pages of levers have what `benchmarks/levers.py` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.levers import PAIRS, THIRTY, WIDTH, table
from tests.draws import Draw

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"levers.md": PAIRS, "levers-questions.md": THIRTY}
TABLES = re.compile(r"(?<=^```\n)model .*?(?=^```$)", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_have_the_figures_of_today(name: str, draw: Draw, request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update")
    tables = [table(words) for words in (PAGES[name] if update else draw(PAGES[name], 1))]
    assert all(len(line) <= WIDTH for lines in tables for line in lines)
    wanted = "\n\n".join("\n".join(lines) for lines in tables)
    page = DOCS / name
    text = page.read_text(encoding="utf-8")
    if update:
        text = TABLES.sub(wanted + "\n", text)
        page.write_text(text, encoding="utf-8")
    assert wanted in text, "pytest tests/test_levers.py --update"
    assert text.count("tok/s off") == len(PAGES[name])
