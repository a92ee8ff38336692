"""The page of levers has what `benchmarks/levers.py` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.levers import PAIRS, WIDTH, table
from tests.draws import Draw

PAGE = Path(__file__).resolve().parents[1] / "docs" / "levers.md"
TABLES = re.compile(r"(?<=^```\n)model .*?(?=^```$)", re.DOTALL | re.MULTILINE)


@pytest.mark.commands
def test_the_page_has_the_figures_of_today(draw: Draw, request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update")
    tables = [table(words) for words in (PAIRS if update else draw(PAIRS, 1))]
    assert all(len(line) <= WIDTH for lines in tables for line in lines)
    wanted = "\n\n".join("\n".join(lines) for lines in tables)
    text = PAGE.read_text(encoding="utf-8")
    if update:
        text = TABLES.sub(wanted + "\n", text)
        PAGE.write_text(text, encoding="utf-8")
    assert wanted in text, "pytest tests/test_levers.py --update"
    assert text.count("tok/s off") == len(PAIRS)
