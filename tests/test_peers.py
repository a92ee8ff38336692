"""The pages of features have what `benchmarks/peers.py` measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.peers import Measured, of_experts

ROOT = Path(__file__).resolve().parents[1]


def measured(name: str) -> list[dict[str, Any]]:
    """Returns the rounds of a result."""
    report: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}-2-cores.json").read_text())
    return list(report["measured"])


MEASURED = measured("peers")
TOOLS = ("dstrain", "trl", "llamafactory")
CASES = tuple(dict.fromkeys((one["zero_stage"], one["precision"]) for one in MEASURED))


def cpu_s(case: tuple[int, str], tool: str) -> list[float]:
    """Returns the CPU seconds of each round, in order of their size."""
    return sorted(
        one["cpu_s"] for one in MEASURED if (one["zero_stage"], one["precision"]) == case and one["tool"] == tool
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("page", "to"), [("docs/features.md", "to"), ("docs/zh/features.md", "到")])
def test_a_row_is_what_was_measured(case: tuple[int, str], page: str, to: str) -> None:
    seconds = {tool: cpu_s(case, tool) for tool in TOOLS}
    cells = [f"{median(rounds):.3f} ({rounds[0]:.3f} {to} {rounds[-1]:.3f})" for rounds in seconds.values()]
    ratio = median(seconds["dstrain"]) / min(median(seconds[tool]) for tool in TOOLS[1:])
    row = f"| ZeRO-{case[0]}, {case[1]} | {' | '.join(cells)} | {ratio:.2f} |"
    assert row in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_every_tool_has_five_rounds(case: tuple[int, str]) -> None:
    assert [len(cpu_s(case, tool)) for tool in TOOLS] == [5, 5, 5]


@pytest.mark.parametrize("page", ["docs/monitoring.md", "docs/zh/monitoring.md"])
def test_what_counting_experts_takes_is_what_was_measured(page: str) -> None:
    lines = of_experts([Measured(**one) for one in measured("experts")]).splitlines()
    assert len(lines) == 2
    text = (ROOT / page).read_text(encoding="utf-8")
    for line in lines:
        share, ratio = re.findall(r"\d\.\d+", line)
        assert f"{share} %" in text
        assert ratio in text
        assert float(share) < 1, "percent"
