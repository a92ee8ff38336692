"""The plan's bytes against DeepSpeed's own engine, on two and four CPU ranks under a storage tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.choices import Offload
from tests.conftest import asked_for
from tests.train.engine import Engine
from tests.train.engine_cases import CASES, Case, Measured, predicted, run

IDS = [f"{case.name} x{case.ranks}" for case in CASES]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine, request: pytest.FixtureRequest
) -> dict[str, Measured]:
    """What two ranks made of their cases, and four of theirs."""
    asked = asked_for(request, "case")
    folder: Path = tmp_path_factory.mktemp("engine")
    found: dict[str, Measured] = {}
    for ranks in (2, 4):
        cases = [case for case in CASES if case.ranks == ranks and case in asked]
        results = run(engine, cases, folder / str(ranks), timeout_s=560) if cases else []
        found |= {case.name: result for case, result in zip(cases, results, strict=True)}
    return found


@pytest.mark.parts(144)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_peak_and_steady_bytes_are_the_plans(case: Case, measured: dict[str, Measured]) -> None:
    real, plan = measured[case.name], predicted(case)
    assert plan.peak == pytest.approx(real.peak, rel=0.01)
    assert plan.steady == pytest.approx(real.steady, rel=0.01)


@pytest.mark.parts(144)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_phase_of_the_step_is_the_plans(case: Case, measured: dict[str, Measured]) -> None:
    real, plan = measured[case.name], predicted(case)
    common = plan.phases.keys() & real.phases.keys()  # a frozen embedding has no backward pass
    expected = {"forward", "loss backward", "backward"}
    if case.configuration.zero.offload is Offload.NONE:
        expected.add("step")
    else:
        common -= {"step"}  # the host's
    assert common >= expected
    for phase in common:
        assert plan.phases[phase] == pytest.approx(real.phases[phase], rel=0.04), phase


@pytest.mark.parts(144)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_host_memory_and_each_pinned_buffer_are_the_plans(case: Case, measured: dict[str, Measured]) -> None:
    real, plan = measured[case.name], predicted(case)
    assert plan.host == pytest.approx(real.host, rel=1e-3, abs=1024)
    assert plan.pinned == real.pinned


@pytest.mark.parts(144)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_nothing_is_left_of_an_engine_that_is_gone(case: Case, measured: dict[str, Measured]) -> None:
    assert measured[case.name].left == 0
