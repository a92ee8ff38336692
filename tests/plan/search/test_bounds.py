"""Bounds are below what is estimated, for every way to train: else the search would lose plans."""

from __future__ import annotations

import random
from operator import le
from typing import Any

import pytest
from cases import ask

from dstrain.choices import Optimizer
from dstrain.plan.estimate import assess
from dstrain.plan.memory.peak import Detail
from dstrain.plan.request import Request
from dstrain.plan.search.appetite import appetite_of, kind_of
from dstrain.plan.search.bounds import bound, end_s, passes_s
from dstrain.plan.search.evaluator import ALIKE_RATIO, SCATTER_RATIO, least_bytes
from dstrain.plan.search.search_space import Candidate, space
from dstrain.plan.speed.step_time import speed
from tests.draws import Draw

QUESTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"model": "qwen3-32b", "gpus": 16}, {}),
    ({"model": "qwen3-8b", "gpus": 8, "gpu": "h100", "nvme": "/nvme"}, {}),
    ({"model": "qwen3-0.6b", "gpus": 4, "gpu": "4090"}, {"seq_len": 1024}),
    ({"model": "llama-3.1-70b", "gpus": 16, "gpu": "h200"}, {}),
    ({"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "h100"}, {}),
    ({"model": "mixtral-8x7b", "gpus": 8, "gpu": "h100"}, {"seq_len": 2048}),
    ({"model": "qwen3-8b", "gpus": 2, "gpu": "4090", "method": "lora"}, {}),
    ({"model": "qwen3-8b", "gpus": 1, "gpu": "4090", "method": "qlora"}, {}),
    ({"model": "gemma-3-27b", "gpus": 8, "gpu": "a100-40g"}, {}),
    ({"model": "phi-4", "gpus": 8, "gpu": "l40s"}, {}),
    ({"model": "qwen3-8b", "gpus": 4}, {"liger": True}),
    ({"model": "qwen3-8b", "gpus": 4}, {"optimizer": Optimizer.ADAMW_8BIT}),
    ({"model": "qwen3-8b", "gpus": 4}, {"optimizer": Optimizer.ADAMW_BF16}),
    ({"model": "qwen2.5-1.5b", "gpus": 8, "gpu": "v100-32g"}, {}),
)
"""Models, machines and wishes, as unlike as can be."""
SAMPLES = 40
"""Candidates of each question."""
COMPARED = 20
"""Candidates whose bound is compared with the estimate."""
PAIRS = 6
"""Comparable candidates of each kind, and those of them that a sample tries."""
DRAWN = 10
"""Those of them that a sample tries."""
REPLAYED = 1
"""Those of them for which a sample replays the allocator."""


@pytest.mark.parametrize(("options", "wishes"), QUESTIONS, ids=lambda each: "-".join(str(v) for v in each.values()))
def test_no_estimate_is_below_its_bound(options: dict[str, Any], wishes: dict[str, Any], draw: Draw) -> None:
    asked = ask(**options)
    workload = asked.workload
    request = Request(method=asked.request.method, sp=None, tp=None, **wishes)
    candidates = space(workload, request)
    for each in draw(random.Random(0).sample(candidates, min(SAMPLES, len(candidates))), DRAWN):
        configuration = each.configuration(workload.model)
        least, memory = bound(workload, each.way), assess(workload, configuration).memory
        known = speed(workload, configuration)
        assert least.device_bytes(each.micro_batch, each.grad_accum) <= memory.device_bytes_per_gpu, configuration
        assert least.host_bytes <= memory.host_bytes_per_node, configuration
        assert least.load_bytes in (0, memory.load.device_bytes_per_gpu), configuration
        assert known is not None
        least_s = each.grad_accum * passes_s(workload, each.way, each.micro_batch) + end_s(workload, each.way)
        assert least_s <= known.step_s * (1 + 1e-9), configuration


@pytest.mark.parametrize(("options", "wishes"), QUESTIONS, ids=lambda each: "-".join(str(v) for v in each.values()))
def test_a_larger_appetite_never_lives_in_less(options: dict[str, Any], wishes: dict[str, Any], draw: Draw) -> None:
    """What is too large excludes all that is larger, which is not estimated any more."""
    workload = ask(**options).workload
    request = Request(method=ask(**options).request.method, sp=None, tp=None, **wishes)
    kinds: dict[object, list[Candidate]] = {}
    for candidate in space(workload, request):
        kinds.setdefault(kind_of(candidate), []).append(candidate)
    pairs: list[tuple[Candidate, Candidate]] = []
    rng = random.Random(0)
    for kin in kinds.values():
        drawn = [sorted(rng.sample(kin, 2), key=appetite_of) for _ in range(SAMPLES) if len(kin) > 1]
        pairs += [(less, more) for less, more in drawn if all(map(le, appetite_of(less), appetite_of(more)))][:PAIRS]
    assert len(pairs) > PAIRS
    for less, more in draw(pairs, PAIRS):
        least, most = (
            assess(workload, each.configuration(workload.model), detail=Detail.ENGINE) for each in (less, more)
        )
        assert least_bytes(least) <= (1 + ALIKE_RATIO) * least_bytes(most), (less, more)
    for less, more in draw(pairs, REPLAYED):
        least, most = (assess(workload, each.configuration(workload.model)) for each in (less, more))
        held = most.memory.device_bytes_per_gpu
        assert least.memory.device_bytes_per_gpu <= (1 + SCATTER_RATIO) * held, (less, more)


def test_bounds_are_near_enough_to_exclude(draw: Draw) -> None:
    asked = ask(model="qwen3-32b", gpus=16)
    compared = 0
    for each in draw(space(asked.workload, asked.request), COMPARED):
        found = assess(asked.workload, each.configuration(asked.workload.model)).memory.device_bytes_per_gpu
        if found > asked.workload.cluster.gpu.memory_bytes / 4:  # below that, buckets and gathered layers prevail
            assert bound(asked.workload, each.way).device_bytes(each.micro_batch, each.grad_accum) > 0.4 * found
            compared += 1
    assert compared > 2
