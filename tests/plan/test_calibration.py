"""What runs say about the planner's constants: on simulated machines, and by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from statistics import median

import pytest

from benchmarks.calibrate import Machine, examine, ran
from dstrain.choices import Attention, Offload
from dstrain.facts.cluster.calibration import Measured
from dstrain.facts.cluster.cluster import Origin
from dstrain.plan.calibration import WIDTHS, Constant, Fit, Observed, fit, solve
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory.memory import memory
from dstrain.plan.next_run import next_run
from dstrain.plan.speed.efficiency import efficiency
from tests.plan.machines import cluster

FLASH = changed(DEFAULTS, attn=Attention.FLASH_ATTENTION_2, zero_stage=2, micro_batch=4, grad_ckpt=True)
SHAPES = ((1024, 4), (2048, 4), (4096, 2), (8192, 1))
HIDDEN = Measured(gemm_ratio=0.45, context_bytes=10**9, nccl_bytes=2 * 10**9, reserved_ratio=1.1)


@cache
def runs(hidden: Measured = HIDDEN, *, num_gpus: int = 8) -> tuple[Observed, ...]:
    """Returns four runs of a machine with hidden constants."""
    machine, draw = Machine(cluster=cluster(num_gpus), hidden=hidden), random.Random(1)
    return tuple(
        ran(machine, "qwen3-1.7b", changed(FLASH, seq_len=length, micro_batch=rows), draw) for length, rows in SHAPES
    )


@cache
def fitted() -> Fit:
    """Returns what those runs say."""
    return fit(runs())


@pytest.mark.commands
def test_after_five_runs_the_next_plan_is_right_on_machines_with_hidden_constants() -> None:
    results = [examine(random.Random(f"0 {number}"), 5, choice="differ") for number in range(4)]
    assert max(abs(result.memory_after) for result in results) < 0.03
    errors = [abs(result.time_after) for result in results]
    assert sum(error < 0.05 for error in errors) >= 0.8 * len(errors)
    assert median(errors) < 0.02
    assert median(abs(result.time_before) for result in results) > 0.05


def test_runs_by_the_priors_move_no_constant_out_of_its_own_range() -> None:
    changes = [
        (math.log((item.new or 1) / item.old), item.error_ratio or 0.0) for item in fit(runs(Measured())).changed
    ]
    assert changes
    assert all(abs(change) < error for change, error in changes if error)


@pytest.mark.commands
def test_the_next_run_offloads_if_none_did_and_narrows_step_times_as_far_as_was_said() -> None:
    seen = runs()
    advice = next_run(seen, fitted())
    assert advice is not None
    assert advice.run.configuration.zero.offload is Offload.OPTIMIZER
    machine = Machine(cluster=cluster(), hidden=HIDDEN)
    later = [*seen, ran(machine, "qwen3-1.7b", advice.run.configuration, random.Random(2))]
    found = fit(later)
    assert any(item.name == "cpu_adam_bytes_per_s" for item in found.changed)
    again = next_run(later, found)
    assert again is not None
    assert again.now == pytest.approx(advice.after, rel=0.2)  # slopes are those at other constants
    assert again.now < 0.7 * advice.now


def test_context_and_nccl_are_told_apart_by_a_run_of_one_rank() -> None:
    together = {item.name: item for item in fitted().constants}
    assert together["context_bytes"].new is None
    assert "together" in (together["context_bytes"].kept or "")
    apart = {item.name: item.new for item in fit([*runs(), *runs(num_gpus=1)]).constants}
    assert apart["context_bytes"] == pytest.approx(HIDDEN.context_bytes, rel=0.02)
    assert apart["nccl_bytes"] == pytest.approx(HIDDEN.nccl_bytes, rel=0.02)


def test_less_than_the_context_was_measured_so_the_context_is_smaller() -> None:
    small = [replace(run, outside_bytes=3 * 10**8) for run in runs()]
    found = {item.name: item.new for item in fit(small).changed}
    assert (found["context_bytes"], found["nccl_bytes"]) == (3 * 10**8, 0)


def test_a_time_without_a_second_one_tells_a_sum_and_its_ranges_say_so() -> None:
    timed = [item for item in fit(runs()[:1]).constants if item.name in WIDTHS]
    told = {item.name for item in timed if item.new is not None and not item.is_uncertain}
    assert len(told) <= 1
    assert any("tell it apart" in (item.kept or "") or item.is_uncertain for item in timed)


def test_nothing_is_fitted_where_nothing_was_measured() -> None:
    bare = [replace(run, step_s=None, reserved_bytes=None, outside_bytes=None) for run in runs()]
    found = fit(bare)
    assert found.constants == ()
    assert found.applied(HIDDEN) == HIDDEN


def test_links_that_doctor_measured_stay() -> None:
    measured = [
        replace(
            run,
            workload=replace(run.workload, cluster=replace(run.workload.cluster, intra_link_origin=Origin.MEASURED)),
        )
        for run in runs()
    ]
    kept = {item.name: item.kept for item in fit(measured).constants}
    assert kept["intra_bus_bytes_per_s"] == "measured by dstrain doctor --network"


def test_the_file_names_the_link_whose_rate_the_runs_tell() -> None:
    found = fitted()
    told = Constant(name="intra_bus_bytes_per_s", old=3.5e11, new=3e11)
    entry = replace(found, constants=(told,)).applied(Measured())
    assert (entry.intra_link, entry.inter_link) == ("nvlink4", None)


def test_a_ratio_replaces_the_replay_only_if_it_is_closer() -> None:
    planned = [memory(run.workload, run.configuration).reserved_bytes_per_gpu for run in runs()]
    as_planned = [replace(run, reserved_bytes=size) for run, size in zip(runs(), planned, strict=True)]
    found = {item.name: item for item in fit(as_planned).constants}["reserved_ratio"]
    assert (found.new, found.kept) == (None, "what plans use is as close")
    assert {item.name for item in fitted().changed} >= {"reserved_ratio"}


def test_a_constant_that_is_hardly_known_does_not_narrow_the_range_of_a_plan() -> None:
    found = fitted()
    entry = found.applied(Measured())
    assert entry.uncertain
    assert {item.name for item in found.changed} - efficiency(cluster(), entry).calibrated == {*entry.uncertain}


def test_least_squares_of_two_unknowns_by_hand() -> None:
    solution = solve(lambda x: [3 - x[0] - x[1], 1 - x[0] + x[1]], [1e-3, 1e-3], [(0, 10), (0, 10)])
    assert solution.values == pytest.approx((2, 1), abs=1e-4)
    assert solution.correlation(0, 1) == pytest.approx(0, abs=1e-3)


def test_what_residuals_do_not_tell_keeps_its_guess_and_width() -> None:
    solution = solve(lambda x: [1 - x[0]], [0.1], [(0, 1), (5, 2)])
    assert (solution.values[1], solution.error(1)) == pytest.approx((5, 2))


def test_two_that_only_count_together_are_correlated() -> None:
    solution = solve(lambda x: [2 - x[0] - x[1]], [0.01], [(0, 1), (0, 1)])
    assert solution.correlation(0, 1) < -0.99
    assert solution.error(0) > 0.7
