"""Changes that fit after an out-of-memory: they fit by the replay, and none is faster."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from dstrain.choices import Method, Offload
from dstrain.facts.workload import Workload
from dstrain.oom import Allocator, Phase
from dstrain.plan.configuration import DEFAULTS, Configuration, changed, flat
from dstrain.plan.estimate import ASKED_GPU_RATIO, USABLE_GPU_RATIO, assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.search.evaluator import Evaluator
from dstrain.plan.search.out_of_memory import (
    Fix,
    Shortage,
    _fits,
    _space,
    evaluated_at_once,
    fixes,
    shortage,
    smaller,
)
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import EQUAL_RATIO, _best, by_time
from dstrain.plan.search.search_space import ROOMY, sized
from dstrain.units import GIB, MIB
from tests.cases import ask
from tests.draws import Draw

MAY_CHANGE = {
    *("micro_batch", "grad_accum", "grad_ckpt", "grad_ckpt_every_n_layers", "activation_offload", "tiled_mlp", "loss"),
    *("zero_stage", "offload", "offload_ratio", "seq_len"),
}

pytestmark = pytest.mark.sweep

NUM_CASES, NUM_SAMPLED = 50, 10
MOST_ERROR = 0.10
"""The most by which the drawn machines need more than the plan says."""
MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "llama-3.1-8b", "mistral-7b", "qwen3-30b-a3b")


@dataclass(frozen=True)
class Case:
    """A run that ran out of memory on a machine that needs more than the plan says."""

    workload: Workload
    estimate: Estimate
    short: Shortage
    error_ratio: float

    def holds(self, configuration: Configuration) -> bool:
        """Returns whether the machine holds a configuration, by the replay of engine and allocator.

        It needs more than the plan says, all of it: the plan is right on a machine that is smaller by as much.
        """
        outside = outside_bytes(self.workload.cluster, configuration)
        limit = round(self.short.limit_bytes / (1 + self.error_ratio)) + outside
        gpu = replace(self.workload.cluster.gpu, memory_mib=limit // MIB)
        workload = replace(self.workload, cluster=replace(self.workload.cluster, gpu=gpu))
        return assess(workload, configuration, usable_gpu_ratio=ASKED_GPU_RATIO).fits

    def has_room(self) -> bool:
        """Returns whether a change exists with which the allocator never gives back its cache."""
        less, current = smaller(self.workload, self.estimate.configuration, self.short), self.estimate.configuration
        evaluator = Evaluator(less, USABLE_GPU_RATIO)
        return any(_fits(evaluator, one) for one in _space(less, current, Phase.BACKWARD, (0, 1, 2, 3)))


def drawn(seed: int) -> Case:
    """Returns a run whose need exceeds what its GPU leaves to PyTorch by 3 to 40 %."""
    random_ = random.Random(seed)
    while True:
        asked = ask(model=random_.choice(MODELS), gpus=random_.choice((1, 2, 8, 16)), gpu="h100", host_memory=2**42)
        way = changed(
            DEFAULTS,
            method=random_.choice((Method.FULL, Method.LORA)),
            seq_len=random_.choice((1024, 2048, 4096)),
            micro_batch=random_.choice((2, 4, 8, 16)),
            grad_accum=random_.choice((1, 2, 4)),
            zero_stage=random_.choice((0, 1, 2, 3)),
            grad_ckpt=random_.random() < 0.5,
            overlap_comm=asked.workload.cluster.num_gpus > 1,
        )
        configuration = sized(asked.workload.model, way, ROOMY)
        if not broken(asked.workload, configuration):
            break
    error_ratio = MOST_ERROR * random_.random()
    outside = outside_bytes(asked.workload.cluster, configuration)
    planned = assess(asked.workload, configuration).memory.device_bytes_per_gpu - outside
    limit = round((1 + error_ratio) * planned * random_.uniform(0.6, 0.97))
    requested = random_.randrange(MIB, GIB)
    held = Allocator(
        requested_bytes=requested,
        allocated_bytes=limit - requested // 2,
        reserved_bytes=limit - requested // 2,
        free_bytes=requested // 2,
        device_bytes=limit + outside,
    )
    gpu = replace(asked.workload.cluster.gpu, memory_mib=held.device_bytes // MIB)
    workload = replace(asked.workload, cluster=replace(asked.workload.cluster, gpu=gpu))
    estimate = assess(workload, configuration)
    return Case(workload, estimate, shortage(workload, estimate, Phase.BACKWARD, held), error_ratio)


@pytest.fixture(scope="module")
def cases(draw: Draw) -> list[tuple[Case, tuple[Fix, ...]]]:
    made = [drawn(number) for number in draw(range(NUM_CASES), NUM_SAMPLED)]
    return [(case, fixes(case.workload, case.estimate, case.short)) for case in made]


def test_every_change_fits_on_a_machine_that_needs_more_than_planned(
    cases: list[tuple[Case, tuple[Fix, ...]]],
) -> None:
    for case, found in cases:
        assert found or not case.has_room(), case
        for fix in found:
            assert case.holds(fix.estimate.configuration), (case, fix.levers)


def test_the_first_change_is_as_fast_as_the_searchs_own_choice_in_the_same_space(
    cases: list[tuple[Case, tuple[Fix, ...]]],
) -> None:
    for case, found in (each for each in cases if each[1]):
        current = case.estimate.configuration
        less = smaller(case.workload, current, case.short)
        evaluator = Evaluator(less, 0.9)
        space = list(_space(less, current, Phase.BACKWARD, (0, 1, 2, 3)))
        _, fastest = _best(evaluator, space, 1)
        assert fastest is not None
        if not _fits(evaluator, fastest):
            continue  # after an out-of-memory, what makes the allocator give back its cache is no change
        first, known = found[0].estimate.speed, evaluator.estimate(fastest).speed
        assert first is not None
        assert known is not None
        assert first.step_s <= known.step_s * (1 + EQUAL_RATIO), (case, found[0].levers)


def test_changes_come_in_the_order_of_their_times(cases: list[tuple[Case, tuple[Fix, ...]]]) -> None:
    for case, _ in cases:
        current = case.estimate.configuration
        evaluator = Evaluator(smaller(case.workload, current, case.short), USABLE_GPU_RATIO)
        timed = by_time(evaluator, _space(evaluator.workload, current, Phase.BACKWARD, (0, 1, 2, 3)))
        keys = [evaluator.time(candidate)[0] for candidate in timed]
        assert all(after >= before * (1 - 1e-9) for before, after in pairwise(keys)), case


def test_changes_differ_in_kind_keep_the_batch_and_name_what_they_change(
    cases: list[tuple[Case, tuple[Fix, ...]]],
) -> None:
    for case, found in cases:
        before = case.estimate.configuration
        total = before.batch.micro_batch * before.step.grad_accum
        assert len({fix.levers for fix in found}) == len(found)
        for fix in found:
            after = fix.estimate.configuration
            kept = {*flat(before)} - MAY_CHANGE
            assert {name for name in kept if flat(before)[name] != flat(after)[name]} == set()
            assert after.batch.micro_batch * after.step.grad_accum == total
            assert fix.keeps_batch == (after.batch.seq_len == before.batch.seq_len)


def test_without_speeds_the_fewest_levers_come_first() -> None:
    asked = ask(model="qwen3-1.7b", gpus=8, gpu="h100", host_memory=2**42)
    gpu = replace(asked.workload.cluster.gpu, bf16_flops_per_s=0.0, fp16_flops_per_s=0.0, fp32_flops_per_s=0.0)
    workload = replace(asked.workload, cluster=replace(asked.workload.cluster, gpu=gpu))
    found = fixes(workload, *short_of(workload, 1, zero_stage=2, micro_batch=16))
    counts = [len(fix.levers) for fix in found]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert {fix.step_ratio for fix in found} == {None}


def test_a_measured_need_above_the_plan_shrinks_the_machine() -> None:
    case = drawn(0)
    worse = replace(case.short, needed_bytes=case.short.predicted_bytes + 3 * GIB)
    current = case.estimate.configuration
    sizes = [smaller(case.workload, current, short).cluster.gpu.memory_bytes for short in (case.short, worse)]
    assert sizes[0] - sizes[1] == pytest.approx(3 * GIB - case.short.excess_bytes, abs=2 * MIB)


@pytest.mark.parametrize("stages", [(2,), (1, 2)])
def test_changes_keep_to_the_stages_that_a_checkpoint_can_be_loaded_under(stages: tuple[int, ...]) -> None:
    asked = ask(model="qwen3-8b", gpus=8, gpu="h100", host_memory=2**42)
    found = fixes(asked.workload, *short_of(asked.workload, 1, zero_stage=2, micro_batch=8), stages=stages)
    assert found
    assert {fix.estimate.configuration.zero.stage for fix in found} <= set(stages)


def test_while_the_model_is_loaded_only_states_can_change() -> None:
    asked = ask(model="qwen3-30b-a3b", gpus=8, gpu="h100", host_memory=2**42)
    found = fixes(asked.workload, *short_of(asked.workload, 0.6, phase=Phase.LOAD, zero_stage=2))
    assert found
    assert all(fix.levers <= {"zero_stage", "offload"} for fix in found)


def test_an_evaluation_takes_the_rows_that_fit_beside_the_states() -> None:
    asked = ask(model="qwen3-0.6b", gpus=1, gpu="h100")
    estimate, short = short_of(asked.workload, 1, phase=Phase.EVALUATION, zero_stage=0)
    resident = estimate.memory.states.device
    short = replace(short, limit_bytes=resident + 30 * GIB, needed_bytes=resident + 32 * GIB)
    assert evaluated_at_once(short, estimate, 16) == 8
    assert evaluated_at_once(short, estimate, 1) is None


def short_of(workload: Workload, ratio: float, phase: Phase = Phase.BACKWARD, **choices: Any) -> tuple[Estimate, Any]:
    """Returns a configuration's estimate, and a shortage on a GPU that holds 0.8 of it times a ratio."""
    configuration = sized(workload.model, changed(DEFAULTS, offload=Offload.NONE, **choices), ROOMY)
    estimate = assess(workload, configuration)
    predicted = estimate.memory.device_bytes_per_gpu - outside_bytes(workload.cluster, configuration)
    limit = round(0.8 * ratio * predicted)
    return estimate, Shortage(phase=phase, limit_bytes=limit, needed_bytes=limit, predicted_bytes=predicted)
