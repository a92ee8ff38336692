"""The verdict after the first steps: what differs from the plan, and the change with what it brings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.facts.cluster.cluster import Cluster
from dstrain.job.schema import Job
from dstrain.monitor.comparison import Part, Quantity
from dstrain.monitor.metrics import read_jsonl
from dstrain.monitor.run_record import read
from dstrain.monitor.verdict import FirstSteps, Verdict
from dstrain.plan.configuration import changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.records import from_data, load_json, to_json
from dstrain.rundir import RunDir
from dstrain.units import GIB
from tests.cases import ask
from tests.report.runs import collectives, gpu_run, night


def judged(folder: Path, *, seen: dict[str, Any] | None = None, **job: Any) -> tuple[Verdict, int, FirstSteps]:
    """Returns the verdict on a recorded run, the step after which it is given, and what gives it."""
    place = RunDir(folder)
    model = ask(model="qwen3-8b", gpus=8, gpu="h100").workload.model
    facts = json.loads(place.facts.read_text())
    cluster = from_data(Cluster, facts["cluster"], locate=str)
    asked = Job(model="m", data="d", output_dir=str(folder), **job)
    steps = FirstSteps(record=replace(read(place), job=asked, ds_config={}, model=model, cluster=cluster))
    verdicts = []
    for line in read_jsonl(place.metrics):
        window = {**line, **(seen or {})}
        if "loss" in line and (found := steps.see(window, steps=line["step"])) is not None:
            verdicts.append((found, line["step"]))
    ((verdict, step),) = verdicts
    return verdict, step, steps


def text(verdict: Verdict, steps: FirstSteps) -> str:
    return "\n".join(verdict.lines(steps.record.cluster))


def test_a_run_that_goes_as_planned_has_no_cause(tmp_path: Path) -> None:
    verdict, step, steps = judged(gpu_run(tmp_path / "run", slower=1.05))
    assert (verdict.cause, verdict.advice, step) == (None, None, 20)
    expected = "as planned: nothing differs by more than the range of the plan, time ± 8 %, memory ± 10 %"
    assert expected in text(verdict, steps)
    assert {Quantity.STEP_S, Quantity.PEAK, Quantity.STATES} <= {one.quantity for one in verdict.comparisons}


def test_it_waits_for_steps_that_have_warmed_up_and_says_which_do_not_count(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run")
    verdict, _, steps = judged(folder)
    assert text(verdict, steps).startswith("after 20 steps, beside the plan (without 1 step that warms up):")
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for number, line in enumerate(line for line in lines if "loss" in line):
        longer = max(1.0, 6 * 0.85**number)
        line |= {"step_s": line["step_s"] * longer, "tokens_per_s": line["tokens_per_s"] / longer}
    every_fifth = [line for line in lines if line["step"] % 5 == 0]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in every_fifth))
    verdict, step, steps = judged(folder)
    assert (step, verdict.steps) == (20, 20)
    assert "beside the plan (without 10 steps that warm up):" in text(verdict, steps)


def test_a_run_whose_speed_still_rises_is_judged_late_and_says_so(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run", steps=60)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()][9::10]
    for line, step_s in zip(lines, (1.2533, 0.5552, 0.3012, 0.1811, 0.1211, 0.1), strict=True):
        line |= {"step_s": step_s, "tokens_per_s": 1967 / step_s}
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    verdict, step, steps = judged(folder)
    assert step == 50
    assert "(without 40 steps that warm up; the last may warm up, too):" in text(verdict, steps)


def test_waiting_for_data_is_answered_with_more_processes_and_what_they_bring(tmp_path: Path) -> None:
    verdict, _, steps = judged(gpu_run(tmp_path / "run", slower=1.5, waits=1 / 3), dataloader_num_workers=2)
    assert verdict.cause is not None
    assert verdict.cause.part is Part.DATA_WAIT
    assert verdict.advice is not None
    assert verdict.advice.step_ratio == pytest.approx(-1 / 3)
    assert "to change: dataloader_num_workers: 4 in the job (now 2): up to 2.33 s of a step of 7.00 s (33 %)" in text(
        verdict, steps
    )


def test_slower_training_has_no_line_to_change(tmp_path: Path) -> None:
    verdict, _, _ = judged(gpu_run(tmp_path / "run", slower=1.5))
    assert verdict.cause is not None
    assert (verdict.cause.part, verdict.advice) == (Part.TRAINING, None)
    assert "no single setting explains it" in verdict.note


@pytest.mark.parametrize(
    ("more", "part", "words"),
    [
        ({"late": 2.0}, Part.SLOWER_RANKS, "health rules name the slow rank"),
        ({"least": 14.0, "bus_share": 0.2}, Part.COMMUNICATION, "links reach 20% of what the plan expects"),
        ({"least": 14.0}, Part.COMMUNICATION, "more tokens between collectives hide them"),
        ({}, Part.COMPUTATION, "every rank computes longer than planned"),
    ],
)
def test_a_slower_step_is_put_down_to_ranks_links_or_computation(
    tmp_path: Path, more: dict[str, float], part: Part, words: str
) -> None:
    verdict, _, steps = judged(gpu_run(tmp_path / "run", slower=1.5, more=collectives(**more)))
    assert verdict.cause is not None
    assert verdict.cause.part is part
    assert words in text(verdict, steps)
    assert "  a step: " in text(verdict, steps)
    saved, step_s = verdict.cause.measured - verdict.cause.planned, sum(one.measured for one in verdict.parts)
    assert f"; to save: up to {saved:.2f} s of a step of {step_s:.2f} s ({100 * saved / step_s:.0f} %)" in verdict.note


def test_many_small_collectives_are_answered_with_a_larger_bucket(tmp_path: Path) -> None:
    more = collectives(least=14.0) | {"comm_bytes": 1e9, "comm_calls": 2000.0}
    folder = gpu_run(tmp_path / "run", slower=1.5, more=more)
    plan = RunDir(folder).plan
    data = json.loads(plan.read_text())
    data["configuration"]["reduce_bucket_size"] = 1_000_000
    plan.write_text(json.dumps(data))
    verdict, _, _ = judged(folder)
    assert verdict.advice is not None
    assert verdict.advice.setting.startswith("zero_optimization.reduce_bucket_size: 50000000 in ds_config.json (now 1")
    assert verdict.cause is not None
    saved, step_s = verdict.cause.measured - verdict.cause.planned, sum(one.measured for one in verdict.parts)
    assert verdict.advice.gain.startswith(f"up to {saved:.2f} s of a step of {step_s:.2f} s ")
    assert verdict.advice.step_ratio == pytest.approx(-saved / step_s)


def without_overlap(folder: Path, **changes: Any) -> Path:
    """Makes the plan of a run one without `overlap_comm`."""
    place = RunDir(folder)
    workload = ask(model="qwen3-8b", gpus=8, gpu="h100").workload
    planned = load_json(Estimate, place.plan)
    place.plan.write_text(to_json(assess(workload, changed(planned.configuration, overlap_comm=False, **changes))))
    return folder


def test_overlap_comm_is_proposed_with_what_it_brings_by_the_plan(tmp_path: Path) -> None:
    folder = without_overlap(gpu_run(tmp_path / "run", slower=1.5, more=collectives(least=14.0)))
    verdict, _, _ = judged(folder)
    assert verdict.cause is not None
    assert verdict.cause.part is Part.COMMUNICATION
    assert verdict.advice is not None
    assert verdict.advice.setting.startswith("zero_optimization.overlap_comm: true")
    ratio, step_s = verdict.advice.step_ratio, sum(one.measured for one in verdict.parts)
    assert ratio is not None
    assert -verdict.cause.measured / step_s < ratio < 0
    assert verdict.advice.gain.startswith(
        f"about {-ratio * step_s:.2f} s of a step of {step_s:.2f} s ({-ratio:.0%}"[:-1]
    )


def test_a_faster_run_than_planned_is_worth_a_calibration(tmp_path: Path) -> None:
    verdict, _, _ = judged(gpu_run(tmp_path / "run", slower=0.7))
    assert verdict.advice is None
    assert "dstrain report --calibrate" in verdict.note


def test_memory_beyond_the_plan_that_fits_needs_no_change(tmp_path: Path) -> None:
    held = {"reserved_bytes_by_rank": [50 * GIB] * 8, "outside_bytes_by_rank": [2 * GIB] * 8}
    verdict, _, _ = judged(gpu_run(tmp_path / "run", more_bytes=8 * GIB), seen=held)
    assert verdict.cause is not None
    assert (verdict.cause.part, verdict.advice) == (Part.TRANSIENT, None)
    assert verdict.note.startswith("still fits: ")


def test_memory_that_leaves_less_than_a_tenth_is_answered_by_the_planner(tmp_path: Path) -> None:
    held = {"reserved_bytes_by_rank": [75 * GIB] * 8, "outside_bytes_by_rank": [2 * GIB] * 8}
    verdict, _, steps = judged(gpu_run(tmp_path / "run", more_bytes=8 * GIB), seen=held)
    assert steps.record.cluster is not None
    assert verdict.advice is not None
    assert verdict.advice.device_bytes_per_gpu is not None
    assert verdict.advice.device_bytes_per_gpu < 0.9 * steps.record.cluster.gpu.memory_bytes
    assert verdict.advice.step_ratio is not None
    assert verdict.advice.step_ratio > 0
    assert "GiB per GPU, a step takes" in verdict.advice.gain


def test_ranks_on_a_cpu_compare_bytes_only_and_say_so(tmp_path: Path) -> None:
    verdict, _, steps = judged(night(tmp_path / "night"))
    assert (verdict.cause, verdict.advice) == (None, None)
    assert verdict.note == "no time is planned on a CPU; bytes are as planned (memory ± 10 %)"
    assert "model states per rank" in text(verdict, steps)


def small_reductions(folder: Path, *, latency_s: float | None, calls: float) -> Path:
    """Returns a run on two CPU ranks whose reductions were counted, with a bucket of 1,000 elements."""
    place = RunDir(night(folder))
    facts, plan = (json.loads(path.read_text()) for path in (place.facts, place.plan))
    facts["cluster"]["intra_link"]["latency_s"] = latency_s
    plan["configuration"]["reduce_bucket_size"] = 1000
    reduced = {"comm/all_reduce_calls": calls, "comm/all_reduce_bytes": 4.2e6, "comm/all_reduce_s": 0.09}
    lines = read_jsonl(place.metrics)
    for line in lines:
        if "loss" in line:
            line |= reduced | {"comm_s_by_rank": [0.1, 0.1], "step_s": 0.2}
    place.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for path, data in ((place.facts, facts), (place.plan, plan)):
        path.write_text(json.dumps(data))
    return folder


def test_small_reductions_are_answered_by_measured_latency_where_no_time_is_planned(tmp_path: Path) -> None:
    verdict, _, steps = judged(small_reductions(tmp_path / "run", latency_s=3e-4, calls=102.0))
    assert steps.record.estimate is not None
    assert verdict.cause is None
    assert verdict.advice is not None
    whole = steps.record.estimate.num_trainable_params
    assert verdict.advice.setting == f"zero_optimization.reduce_bucket_size: {whole} in ds_config.json (now 1000)"
    fewer = steps.record.estimate.configuration.step.grad_accum
    least = (102 - fewer) * 3e-4
    assert verdict.advice.step_ratio == pytest.approx(-least / 0.2)
    assert verdict.advice.gain == (
        f"{least:.2f} s ({100 * least / 0.2:.0f} %) to 0.09 s (45 %) of a step of 0.20 s: 102 reductions of 40.2 KiB on"
        f" average become {fewer}; each takes at least 0.3 ms, however small (`dstrain doctor --network`)"
    )
    assert verdict.note.startswith("no time is planned on a CPU")


@pytest.mark.parametrize(("latency_s", "calls"), [(None, 102.0), (3e-5, 102.0), (3e-4, 7.0)])
def test_reductions_that_take_little_or_unknown_time_are_left_alone(
    tmp_path: Path, latency_s: float | None, calls: float
) -> None:
    verdict, _, _ = judged(small_reductions(tmp_path / "run", latency_s=latency_s, calls=calls))
    assert verdict.advice is None


def test_a_verdict_is_a_line_of_the_metrics_that_is_no_step(tmp_path: Path) -> None:
    verdict, _, _ = judged(gpu_run(tmp_path / "run", slower=1.5, waits=1 / 3))
    data = json.loads(json.dumps(verdict.to_data()))
    assert (data["event"], data["step"], data["cause"]["part"]) == ("verdict", 20, "waiting for data")
    assert data["advice"]["setting"] == "dataloader_num_workers: 2 in the job (now 0)"


def test_a_run_without_a_plan_has_no_verdict(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "run")
    RunDir(folder).plan.unlink()
    steps = FirstSteps(record=read(RunDir(folder)))
    assert all(steps.see(line, steps=line["step"]) is None for line in read_jsonl(RunDir(folder).metrics))
