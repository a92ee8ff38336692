"""`benchmarks/measure.py`: what it asks of the plan and of the engine is the same, and one case from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure import Result, plan_of
from benchmarks.measured_cases import CPU_CASES, GPU_CASES, SHAPES, Case, ds_config
from dstrain.choices import Offload
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.model import families
from dstrain.plan.configuration import flat
from dstrain.plan.estimate import effective
from dstrain.plan.request import Request
from tests.train.launching import CHECKOUT, environment

EVERY = [*GPU_CASES, *CPU_CASES]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_the_engine_is_told_what_the_plan_is_asked_about(case: Case) -> None:
    configuration = case.configuration()
    model = families.from_config(SHAPES[case.shape], name=case.shape, source=case.shape)
    found = effective(model, Request(packing=True), ds_config(configuration))
    names = ["zero_stage", "offload", "overlap_comm", "reduce_bucket_size"]
    if case.stage == 3:
        names += ["prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"]
        names += ["sub_group_size"]
    engine, asked = flat(found), flat(configuration)
    assert {name: engine[name] for name in names} == {name: asked[name] for name in names}


def test_no_two_cases_have_one_name() -> None:
    for cases in (GPU_CASES, CPU_CASES):
        assert len({case.name for case in cases}) == len(cases)


def test_about_twenty_cases_cover_stages_methods_offloading_lengths_and_kernels() -> None:
    assert 18 <= len(GPU_CASES) <= 22
    assert {case.stage for case in GPU_CASES} == {0, 1, 2, 3}
    assert {case.offload for case in GPU_CASES} == {Offload.NONE, Offload.OPTIMIZER, Offload.PARAMS}
    assert (min(case.seq_len for case in GPU_CASES), max(case.seq_len for case in GPU_CASES)) == (512, 16384)
    for claim in ("lora", "liger", "grad_ckpt"):
        assert {getattr(case, claim) for case in GPU_CASES} == {False, True}


@pytest.mark.commands
def test_a_gpu_of_80_gib_has_room_for_most_cases() -> None:
    cluster = clusters.describe(
        gpu=gpus.gpu("h100"), gpu_origin=Origin.GIVEN, gpus=1, host_memory_bytes=2**40, host_memory_origin=Origin.GIVEN
    )
    assert sum(plan_of(case, cluster).fits for case in GPU_CASES) >= 16


def result(outcome: str) -> Result:
    planned = {"live_bytes": 11.0, "reserved_bytes": None}
    measured = {"live_bytes": 10.0, "step_s": 1.0}
    return Result(name="x", outcome=outcome, fits=True, planned=planned, measured=measured, versions={})


def test_an_error_is_planned_over_measured_less_one() -> None:
    assert result("ok").error("live_bytes") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("outcome", "quantity"), [("ok", "reserved_bytes"), ("ok", "step_s"), ("out of memory", "live_bytes")]
)
def test_what_was_not_planned_or_not_measured_to_its_end_has_no_error(outcome: str, quantity: str) -> None:
    assert result(outcome).error(quantity) is None


@pytest.mark.cluster
@pytest.mark.parts(6, at=3)
def test_one_case_is_measured_on_the_cpu_and_compared_with_its_plan(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    program = [sys.executable, str(CHECKOUT / "benchmarks" / "measure.py")]
    words = ["--only", "full z2 s512x2", "--json", str(answer)]
    surroundings = {**environment(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*program, *words], env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(answer.read_text(encoding="utf-8"))["results"]
    assert found["outcome"] == "ok"
    assert found["planned"]["live_bytes"] == pytest.approx(found["measured"]["live_bytes"], rel=0.02)
    assert found["measured"]["step_s"] > 0
    assert "live: mean error" in done.stdout
