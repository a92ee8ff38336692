"""The pages of monitoring have what `benchmarks/overhead.py` measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import peers
from benchmarks.overhead import COUNTED, OFF, SIZES, Measured

ROOT = Path(__file__).resolve().parents[1]
MEASURED = [
    Measured(**one)
    for one in json.loads((ROOT / "benchmarks/results/overhead-2-cores.json").read_text(encoding="utf-8"))["measured"]
]


@pytest.mark.parametrize("page", ["docs/monitoring.md", "docs/zh/monitoring.md"])
def test_the_page_has_the_counted_share(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    share = median(one.monitor_cpu_s / one.cpu_s for one in MEASURED if one.variant == COUNTED)
    assert f"{100 * share:.2f} %" in text


def test_every_variant_has_the_same_rounds() -> None:
    rounds = {name: {one.number for one in MEASURED if one.variant == name} for name in ("all", COUNTED, OFF)}
    assert len(set(map(frozenset, rounds.values()))) == 1
    assert len(rounds[OFF]) >= 12
    assert {one.variant for one in MEASURED} == set(rounds)


def test_it_has_every_size_that_the_inputs_need() -> None:
    assert set(SIZES) == set(peers.SIZES)
