"""The tape's peaks equal those of Transformers' own code, traced without data, for every family and way to train."""

from __future__ import annotations

import pytest

from tests.draws import Draw
from tests.plan.memory.layers.comparing import Compared, compare
from tests.plan.memory.layers.shapes import FAMILIES, WAYS, Case, cases

pytestmark = pytest.mark.sweep

DRAWN = 2
"""Ways of each family that a sample tries."""


@pytest.fixture(scope="module")
def compared(draw: Draw) -> dict[str, list[Compared]]:
    """Every family, one shape for each way, traced in one child process."""
    asked: dict[str, list[Case]] = {family: [] for family in FAMILIES}
    for case in cases(shapes=1):
        asked[case.family].append(case)
    assert all(len(of_family) == len(WAYS) for of_family in asked.values())
    answers = compare([case for of_family in asked.values() for case in draw(of_family, DRAWN)])
    return {family: [answer for answer in answers if answer.family == family] for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_tape_equals_trace(compared: dict[str, list[Compared]], family: str) -> None:
    assert len(compared[family]) >= DRAWN
    outside = [
        f"{case.error_ratio:+.3%} of {case.trace_instant}: {case.way}; {case.shape}"
        for case in compared[family]
        if not case.is_within
    ]
    assert not outside, "\n".join(outside)
