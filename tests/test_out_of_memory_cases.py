"""What is published of the benchmark of out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CASES: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/out_of_memory-cpu.json").read_text())["cases"]


def test_every_published_change_trained_within_the_limit_and_none_known_is_faster() -> None:
    again = [case for case in CASES if case["fits"] is not None]
    assert [case["number"] for case in again if not case["fits"]] == []
    assert [case["number"] for case in CASES if case["is_cheapest"] is False] == []
    for page in ("docs/report.md", "docs/zh/report.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count(f" {len(again)} |") == 2
        assert f" {len(CASES)} |" in text
