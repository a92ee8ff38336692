"""What a run measured beside its plan, and the part that differs most."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.monitor.comparison import Comparison, Part, Quantity, comparisons, largest_difference, step_parts
from dstrain.monitor.run_record import read
from dstrain.rundir import RunDir
from dstrain.units import GIB
from tests.report.runs import collectives, gpu_run, night


def compared(folder: Path) -> dict[Quantity, Comparison]:
    return {one.quantity: one for one in comparisons(read(RunDir(folder)))}


def test_a_run_that_goes_as_planned_differs_in_nothing(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run", more=collectives())
    found = compared(folder)
    assert set(found) == set(Quantity) - {Quantity.HOST}
    assert {quantity: one.off for quantity, one in found.items()} == pytest.approx(dict.fromkeys(found, 0.0))
    assert largest_difference(read(RunDir(folder))) is None


def test_the_first_window_which_holds_the_warm_up_does_not_count(tmp_path: Path) -> None:
    found = compared(gpu_run(tmp_path / "run", steps=2))
    assert found[Quantity.STEP_S].off == pytest.approx(0.0)


def test_waiting_for_data_is_named_where_it_is_what_makes_steps_slower(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run", slower=1.5, waits=1 / 3)
    assert compared(folder)[Quantity.STEP_S].off == pytest.approx(0.5)
    worst = largest_difference(read(RunDir(folder)))
    assert worst is not None
    assert (worst.part, worst.planned) == (Part.DATA_WAIT, 0.0)
    assert worst.share == pytest.approx(0.5)


def test_slower_training_is_named_where_data_are_on_time(tmp_path: Path) -> None:
    worst = largest_difference(read(RunDir(gpu_run(tmp_path / "run", slower=1.5))))
    assert worst is not None
    assert worst.part is Part.TRAINING
    assert worst.share == pytest.approx(0.5)


def test_the_parts_of_a_step_sum_to_it_and_a_late_rank_is_apart_from_the_links(tmp_path: Path) -> None:
    run = read(RunDir(gpu_run(tmp_path / "run", slower=1.5, waits=0.1, more=collectives(least=2.0, late=0.2))))
    parts = {one.part: one for one in step_parts(run)}
    assert sum(one.measured for one in parts.values()) == pytest.approx(run.windows[-1]["step_s"])
    assert parts[Part.SLOWER_RANKS].measured == pytest.approx(0.2 * 7 / 8)
    links = parts[Part.COMMUNICATION]
    assert links.planned is not None
    assert links.measured == pytest.approx(2 * links.planned)


def test_ranks_that_wait_for_one_that_waits_for_data_count_as_waiting_for_data(tmp_path: Path) -> None:
    more = collectives(late=0.2) | {"data_wait_s_by_rank": [0.0] * 7 + [0.2], "data_wait_share": 0.05}
    parts = {one.part: one.measured for one in step_parts(read(RunDir(gpu_run(tmp_path / "run", more=more))))}
    assert parts[Part.SLOWER_RANKS] == pytest.approx(0.0, abs=1e-9)


def test_activations_are_named_where_states_are_as_planned_and_the_peak_is_not(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run", more_bytes=8 * GIB)
    peak = compared(folder)[Quantity.PEAK]
    assert peak.planned is not None
    assert peak.measured == peak.planned + 8 * GIB
    assert len(peak.ranks) == 8
    worst = largest_difference(read(RunDir(folder)))
    assert worst is not None
    assert (worst.part, worst.measured - worst.planned) == (Part.TRANSIENT, 8 * GIB)


def test_a_cpu_has_model_states_and_no_other_plan(tmp_path: Path) -> None:
    found = compared(night(tmp_path / "night"))
    assert {quantity for quantity, one in found.items() if one.planned is not None} == {Quantity.STATES}
    assert found[Quantity.STATES].off == pytest.approx(0.0, abs=1e-5)
    assert found[Quantity.STEP_S].measured == pytest.approx(0.8, rel=0.5)
