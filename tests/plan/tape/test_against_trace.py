"""The tape's peaks equal those of Transformers' own code, traced without data, for every family and way to train."""

from __future__ import annotations

import pytest

from tests.plan.tape.comparing import Compared, compare
from tests.plan.tape.shapes import FAMILIES, cases
from tests.plan.tape.ways import WAYS


@pytest.fixture(scope="module")
def compared() -> dict[str, list[Compared]]:
    """Every family in every way, one shape each, traced in one child process: about a minute."""
    found: dict[str, list[Compared]] = {family: [] for family in FAMILIES}
    for case in compare(list(cases(shapes=1))):
        found[case.family].append(case)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tape_equals_trace(compared: dict[str, list[Compared]], family: str) -> None:
    assert len(compared[family]) == len(WAYS)
    outside = [
        f"{case.error_ratio:+.3%} of {case.trace_instant}: {case.way}; {case.shape}"
        for case in compared[family]
        if not case.is_within
    ]
    assert not outside, "\n".join(outside)
