"""The search finds what looking at everything finds; what it prefers; and what is said when nothing fits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from cases import ask, plan

from dstrain.choices import Method, Offload
from dstrain.errors import DoesNotFit, InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.reserved import _reserved
from dstrain.plan.request import Request
from dstrain.plan.search.decide import choice
from dstrain.plan.search.evaluator import Evaluator, least_bytes, lost_speed, usable_ratio
from dstrain.plan.search.infeasible import ways_that_fit
from dstrain.plan.search.notes import _tower_note
from dstrain.plan.search.search import (
    EQUAL_RATIO,
    MOST_TIE_RATIO,
    TIE_RATIO,
    Ranking,
    _bound,
    _shortage,
    least_plan,
    search,
)
from dstrain.plan.search.search_space import global_batch, mechanisms, space, strategy_key
from dstrain.units import GIB

pytestmark = pytest.mark.commands

QUESTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"model": "qwen3-32b", "gpus": 16}, {"sp": 1, "tp": 1}),
    ({"model": "qwen3-8b", "gpus": 8, "gpu": "h100"}, {"global_batch": 32, "seq_len": 8192}),
    ({"model": "qwen3-8b", "gpus": 2, "gpu": "4090", "method": "lora"}, {}),
    ({"model": "qwen3-8b", "gpus": 1, "gpu": "4090", "method": "lora"}, {"seq_len": 16384, "global_batch": 1}),
    ({"model": "qwen3-0.6b", "gpus": 4, "gpu": "4090"}, {"seq_len": 1024, "global_batch": 24}),
    ({"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "h100"}, {"sp": 1}),
    ({"model": "llama-3.1-70b", "gpus": 8, "gpu": "h100", "host_memory": 2**42}, {"sp": 1, "tp": 1}),
    ({"model": "llama-3.1-405b", "gpus": 8, "gpu": "h100"}, {"sp": 1}),
    ({"model": "qwen3-8b", "gpus": 1, "gpu": "4090"}, {}),
    ({"model": "qwen3-14b", "gpus": 8, "gpu": "4090"}, {"seq_len": 512, "sp": 1}),
)
"""Models, machines and wishes; the last three do not fit."""
REPLAYED = 3
"""Candidates near the limit whose allocator is replayed."""


def chosen(**options: Any) -> Estimate:
    """Returns the choice for these options of gen-config, without its reasons."""
    asked = ask(**options)
    return choice(asked.workload, asked.request)


def without_speed(cluster: Cluster) -> Cluster:
    """Returns the cluster as if its GPU were in no table."""
    gpu = replace(cluster.gpu, bf16_flops_per_s=0.0, fp16_flops_per_s=0.0, fp32_flops_per_s=0.0, hbm_bytes_per_s=0.0)
    return replace(cluster, gpu=gpu)


def everything(**options: Any) -> tuple[Any, Request]:
    """Returns a question with all that DeepSpeed can do left open."""
    asked = ask(**options)
    return asked, replace(asked.request, sp=None, tp=None)


@pytest.mark.sweep
@pytest.mark.parts(16)
@pytest.mark.parametrize(("options", "wishes"), QUESTIONS, ids=lambda each: "-".join(str(v) for v in each.values()))
def test_bounds_lose_nothing(options: dict[str, Any], wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, request = everything(**options)
    request = replace(request, **wishes)
    bounded = search(asked.workload, request)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "may_fit", lambda evaluator, candidate: True)
        whole = search(asked.workload, request)
    assert bounded.fits == whole.fits == (least_plan(asked.workload, request) is not None)
    assert bounded.plans == whole.plans
    assert bounded.num_estimated <= whole.num_estimated


def test_the_whole_space_is_estimated_or_excluded() -> None:
    asked, request = everything(model="qwen3-32b", gpus=16)
    found = search(asked.workload, request)
    assert found.num_estimated + found.num_excluded == len(space(asked.workload, request))
    assert found.num_estimated < found.num_excluded / 100  # of those that are as good as the fastest, the simplest


def sample_s(found: Ranking, cluster: Cluster) -> list[float]:
    """Returns the seconds of one sample under each plan."""
    return [
        each.speed.step_s / global_batch(cluster, each.configuration) for each in found.plans if each.speed is not None
    ]


def test_plans_are_ranked_by_time_and_equals_by_simplicity() -> None:
    asked, request = everything(model="qwen3-8b", gpus=16, gpu="h100")
    found = search(asked.workload, request, top=12)
    times = sample_s(found, asked.workload.cluster)
    assert len(times) == 12
    fastest = min(times)
    assert times[0] <= fastest * (1 + MOST_TIE_RATIO)
    as_fast = [plan for plan, time in zip(found.plans, times, strict=True) if time <= fastest * (1 + TIE_RATIO)]
    simplest = mechanisms(found.plans[0].configuration)
    assert all(simplest <= mechanisms(plan.configuration) for plan in as_fast)


def test_a_gain_that_may_be_an_error_is_not_worth_a_mechanism() -> None:
    asked, request = everything(model="qwen3-32b", gpus=16, gpu="a100-80g", seq_len=32768)
    found = search(asked.workload, request)
    first, fastest = found.plans[0].configuration, found.fastest.configuration
    assert (first.parallel.sp, first.zero.offload, first.checkpointing.period) == (1, Offload.NONE, 1)
    assert (fastest.parallel.sp, fastest.zero.offload, fastest.checkpointing.period) == (8, Offload.PARAMS, 2)
    assert 0.05 < found.difference_error_ratio < 0.15


@pytest.mark.parametrize(
    "options",
    [
        {"model": "qwen3-0.6b", "gpus": 8, "gpu": "h100", "seq_len": 2048},
        {"model": "qwen3-vl-30b-a3b", "gpus": 32, "gpu": "a100-80g"},
    ],
    ids=lambda options: options["model"],
)
def test_simplicity_does_not_cost_both_time_and_memory(options: dict[str, Any]) -> None:
    asked, request = everything(**options)
    found = search(asked.workload, request, top=3)
    first = found.plans[0]
    assert first.speed is not None
    room = EQUAL_RATIO * asked.workload.cluster.gpu.memory_bytes
    for other in found.plans[1:]:
        assert other.speed is not None
        is_faster = other.speed.tokens_per_s_per_gpu > (1 + EQUAL_RATIO) * first.speed.tokens_per_s_per_gpu
        is_smaller = other.memory.live_bytes_per_gpu < first.memory.live_bytes_per_gpu - room
        is_offloaded = other.memory.host_bytes_per_node > first.memory.host_bytes_per_node
        assert not is_faster or not is_smaller or is_offloaded


def test_one_gpu_lists_no_stage_that_shares_nothing() -> None:
    asked, request = everything(model="qwen3-0.6b", gpus=1, gpu="4090", seq_len=2048)
    listed = [plan.configuration.zero for plan in search(asked.workload, request, top=3).plans]
    assert listed[0].stage == 0
    assert not [zero for zero in listed if zero.stage in (1, 2) and not zero.is_offloaded]


def test_each_way_is_listed_once_and_the_choice_does_not_depend_on_how_many_are_shown() -> None:
    asked, request = everything(model="qwen3-8b", gpus=8, gpu="h100")
    many = search(asked.workload, request, top=10)
    assert len({strategy_key(each.configuration) for each in many.plans}) == len(many.plans)
    assert search(asked.workload, request, top=1).plans == many.plans[:1]
    assert search(asked.workload, request, top=3).plans == many.plans[:3]


def test_simplicity_counts_mechanisms() -> None:
    assert mechanisms(DEFAULTS) == 0
    assert mechanisms(changed(DEFAULTS, zero_stage=2, grad_ckpt=True)) == 3
    assert mechanisms(changed(DEFAULTS, zero_stage=3, offload=Offload.PARAMS, pin_memory=False)) == 8
    assert mechanisms(changed(DEFAULTS, zero_stage=3, hpz=8, sp=2)) == 6
    assert mechanisms(changed(DEFAULTS, grad_ckpt=True, activation_offload=True)) == 2
    assert mechanisms(changed(DEFAULTS, sp=4)) == mechanisms(changed(DEFAULTS, sp=2)) + 1


def test_where_nothing_fits_the_nearest_come_first() -> None:
    asked, request = everything(model="llama-3.1-405b", gpus=8, gpu="h100")
    found = search(asked.workload, request, top=4)
    assert (found.fits, len(found.plans)) == (False, 4)
    keys = [(not each.fits_gpu, each.memory.host_bytes_per_node) for each in found.plans if each.fits_gpu]
    assert keys == sorted(keys)
    assert not any(each.fits for each in found.plans)


def test_what_the_gpu_holds_and_ram_does_not_is_nearer_than_what_the_gpu_does_not() -> None:
    asked, request = everything(model="deepseek-v3", gpus=32, gpu="gh200")
    found = search(asked.workload, replace(request, seq_len=1024))
    assert [each.fits_gpu for each in found.plans] == [True] * 3
    least = min(each.memory.host_bytes_per_node for each in found.plans)
    assert found.plans[0].memory.host_bytes_per_node == least > found.plans[0].usable_bytes_per_host


def test_streams_that_together_need_more_than_the_gpu_has_are_not_replayed() -> None:
    asked, request = everything(model="gemma-3-27b", gpus=32, gpu="rtx-3090", method="lora")
    evaluator = Evaluator(asked.workload, usable_ratio(request))
    candidates = [each for each in space(asked.workload, replace(request, seq_len=8192)) if each.way.zero.stage == 3]
    estimates = [(each, evaluator.estimate(each)) for each in random.Random(0).sample(candidates, 20)]
    too_large = [
        each
        for each, estimate in estimates
        if estimate.memory.live_bytes_per_gpu < estimate.usable_bytes_per_gpu < least_bytes(estimate)
    ]
    replays = _reserved.cache_info().misses
    assert too_large
    assert not any(evaluator.verify(each).fits for each in too_large)
    assert _reserved.cache_info().misses == replays
    assert not any(assess(asked.workload, evaluator.configuration(each)).fits_gpu for each in too_large[:2])


@pytest.mark.parametrize(
    ("model", "gpu", "method", "seq_len", "offload"),
    [
        ("qwen3-8b", "rtx-4090-d", "qlora", 32768, Offload.NONE),
        ("deepseek-v3", "gh200", "full", 1024, Offload.OPTIMIZER),
    ],
)
def test_what_fits_by_short_replays_fits_by_whole_ones(
    model: str, gpu: str, method: str, seq_len: int, offload: Offload
) -> None:
    asked, request = everything(model=model, gpus=32, gpu=gpu, method=method, host_memory=2**43)
    short, full = (Evaluator(asked.workload, usable_ratio(request)) for _ in range(2))
    ways = [each for each in space(asked.workload, replace(request, seq_len=seq_len)) if each.way.zero.stage in (1, 3)]
    few = [each for each in ways if each.rung == 0 and each.way.zero.offload is offload and each.micro_batch < 4]
    near = [each for each in few if 1 < _fill(short.estimate(each)) < 1.6][:REPLAYED]
    assert [short.fits(each) for each in near] == [full.verify(each).fits for each in near]
    assert short.failing if model == "qwen3-8b" else short.exact


def _fill(estimate: Estimate) -> float:
    return estimate.memory.device_bytes_per_gpu / estimate.usable_bytes_per_gpu


def test_what_does_not_fit_while_it_is_loaded_is_no_nearer_than_its_bound() -> None:
    asked, request = everything(model="llama-3.1-405b", gpus=8, gpu="rtx-3090", method="qlora", host_memory=2**36)
    evaluator = Evaluator(asked.workload, 0.9)
    candidates = space(asked.workload, replace(request, seq_len=1024))
    for each in random.Random(0).sample(candidates, 40):
        assert _shortage(evaluator, each) >= _bound(evaluator, each)


def test_more_memory_is_never_slower() -> None:
    asked, request = everything(model="qwen3-8b", gpus=4)
    times = []
    for gib in (24, 40, 80, 141):
        cluster = replace(asked.workload.cluster, gpu=replace(asked.workload.cluster.gpu, memory_mib=gib * 1024))
        times.append(sample_s(search(replace(asked.workload, cluster=cluster), request, top=1), cluster)[0])
    assert all(less <= more * (1 + TIE_RATIO) for more, less in pairwise(times))


def test_without_speeds_offload_comes_after_everything_else() -> None:
    asked = ask(model="qwen3-8b", gpus=8, seq_len=1024)
    candidates = space(asked.workload, asked.request)
    ordered = sorted(candidates, key=lambda each: lost_speed(asked.workload.cluster, each))
    order = [each.way.zero.offload for each in ordered]
    assert order == sorted(order, key=list(Offload).index)


def test_without_speeds_smaller_micro_batches_come_after_checkpointing() -> None:
    asked = ask(model="qwen3-8b", gpus=16, seq_len=1024, offload="none", zero_stage=3, sp=1)
    candidates = [each for each in space(asked.workload, asked.request) if each.rung and each.way.zero.hpz == 1]
    order = [
        (each.micro_batch, each.way.checkpointing.enabled)
        for each in sorted(candidates, key=lambda each: lost_speed(asked.workload.cluster, each))
    ]
    assert list(dict.fromkeys(order)) == [(4, False), (4, True), (2, False), (2, True), (1, False), (1, True)]


def test_without_speeds_the_first_in_the_order_of_lost_speed_is_chosen() -> None:
    asked = ask(model="qwen3-8b", gpus=8, gpu="h100", global_batch=16, sp=1)
    cluster = without_speed(asked.workload.cluster)
    workload = replace(asked.workload, cluster=cluster)
    candidates = space(workload, asked.request)
    estimates = (
        assess(workload, each.configuration(asked.workload.model))
        for each in sorted(candidates, key=lambda each: lost_speed(cluster, each))
    )
    first = next(each for each in estimates if each.fits)
    found = search(workload, asked.request)
    assert found.plans[0].configuration == first.configuration


def test_a_choice_that_is_given_is_kept() -> None:
    asked = {"zero_stage": 3, "micro_batch": 2, "grad_ckpt": True, "global_batch": 48}
    found = plan(model="qwen3-0.6b", gpus=8, **asked)
    way = found.chosen.configuration
    assert (way.zero.stage, way.batch.micro_batch, way.checkpointing.enabled) == (3, 2, True)
    assert found.global_batch == 8 * 2 * way.step.grad_accum == 48


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan(model="qwen3-8b", gpus=8, global_batch=50)
    assert caught.value.hint == "Write --global-batch 48 or 56."


def test_what_does_not_fit_names_what_would() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(model="llama-3.1-405b", gpus=8)
    assert "--gpus" in str(caught.value.hint)
    assert "host RAM" in caught.value.problem


def test_a_micro_batch_that_does_not_fit_names_a_smaller_one() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(model="qwen3-8b", gpus=8, offload="none", micro_batch=256, sp=1)
    assert "--micro-batch " in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "fitting"),
    [
        ({"model": "qwen3-235b-a22b", "gpus": 8, "gpu": "h200", "method": "qlora"}, ["--method lora: ZeRO-3"]),
        (
            {"model": "qwen3-14b", "gpus": 1, "gpu": "5090", "host_memory": 2**36},
            ["--method lora: ZeRO-3 + ", "--method qlora: ZeRO-0"],
        ),
        ({"model": "qwen3-32b", "gpus": 16, "zero_stage": 1, "sp": 1}, ["without --zero-stage 1: ZeRO-3"]),
        ({"model": "qwen3-14b", "gpus": 8, "gpu": "a100", "grad_ckpt": False, "offload": "none", "sp": 1,
          "seq_len": 32768}, ["without --no-grad-ckpt: "]),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_each_choice_without_which_something_fits(
    options: dict[str, Any], fitting: list[str]
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(**options)
    lines = [line.strip() for line in str(caught.value.hint).splitlines()]
    assert all(any(line.startswith(words) for line in lines) for words in fitting), lines


def test_parameter_offload_under_zero_2_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--zero-stage 2 and --offload params"):
        plan(model="qwen3-8b", gpus=8, zero_stage=2, offload="params")


def test_a_micro_batch_that_does_not_divide_the_global_batch_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="not a multiple of 2 GPUs × micro-batch 3"):
        plan(model="qwen3-0.6b", gpus=2, micro_batch=3, global_batch=16)


def test_short_samples_do_not_swell_the_default_batch() -> None:
    asked = ask(model="qwen3-8b", gpus=16, gpu="h100", seq_len=256)
    found = choice(asked.workload, asked.request)
    assert global_batch(asked.workload.cluster, found.configuration) == 64


def test_the_gpus_that_would_fit_can_be_typed() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(model="qwen3-8b", gpus=3, gpu="4090")
    assert "--gpus 6: " in str(caught.value.hint)
    with pytest.raises(DoesNotFit) as caught:
        plan(model="qwen3-32b", gpus=3, gpu="4090")
    assert "--gpus 48: " in str(caught.value.hint)


def test_what_the_command_refuses_is_not_proposed() -> None:
    question = ask(model="qwen3-14b", gpus=1, gpu="5090", host_memory=2**36, method="lora", offload="none")

    def judge(options: Mapping[str, Any], request: Request, cluster: Cluster) -> Estimate:
        if options.get("method") is Method.QLORA:
            raise InvalidConfig("4-bit weights cannot be planned")
        return choice(replace(question.workload, cluster=cluster), request)

    words = [way.words for way in ways_that_fit(question.workload, question.request, judge)]
    assert "--gpus 2" in words
    assert "--method qlora" not in words

    def plain(_: Mapping[str, Any], request: Request, cluster: Cluster) -> Estimate:
        return choice(replace(question.workload, cluster=cluster), request)

    named = [way.words for way in ways_that_fit(question.workload, question.request, plain, hosts={"hosts": "a"})]
    assert "--method qlora" in named
    assert any(way.endswith("without --hosts a") for way in named)


def test_nvme_needs_a_folder() -> None:
    with pytest.raises(InvalidConfig, match="--offload nvme"):
        plan(model="qwen3-8b", gpus=8, offload="nvme")


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="32768"):
        plan(model="mistral-7b", gpus=8, seq_len=50_000)


def test_qwen3_reaches_longer_sequences_by_yarn() -> None:
    scaling = chosen(model="qwen3-8b", gpus=8, seq_len=65_536).configuration.batch.rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("yarn", 2.0)


def test_packed_micro_batches_grow_where_memory_allows() -> None:
    found = chosen(model="qwen3-0.6b", gpus=8, gpu="h200", packing=True, seq_len=512)
    assert found.configuration.batch.micro_batch > 1


def test_buffers_grow_into_half_of_the_memory_left() -> None:
    found = chosen(model="qwen3-8b", gpus=8, gpu="h200", zero_stage=3, micro_batch=1)
    assert found.configuration.zero.max_reuse_distance > 10**9
    assert found.usable_bytes_per_gpu - found.memory.device_bytes_per_gpu > 10 * GIB


def test_lora_needs_no_offload_where_full_training_does() -> None:
    full, adapter = (
        chosen(model="qwen3-8b", gpus=1, method=method, host_memory=2**40).configuration for method in ("full", "lora")
    )
    assert full.zero.offload is not Offload.NONE
    assert (adapter.zero.offload, adapter.model.method) == (Offload.NONE, Method.LORA)


def test_what_is_not_counted_of_a_tower_is_said() -> None:
    said = "no images are counted (--image-patches); the vision tower (421.3 M parameters) is frozen"
    inputs = ask(model="gemma-3-12b", gpus=8)
    assert _tower_note(inputs.workload.model, inputs.request) == said
    assert _tower_note(ask(model="qwen3-8b", gpus=8).workload.model, inputs.request) is None
