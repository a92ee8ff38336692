"""Bounds are below what is estimated, for every way to train: else the search would lose plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cases import ask

from dstrain.choices import Optimizer
from dstrain.plan.estimate import assess
from dstrain.plan.request import Request
from dstrain.plan.search.evaluator import bound
from dstrain.plan.search.search_space import space
from tests.draws import Draw

pytestmark = pytest.mark.sweep

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
DRAWN = 10
"""Those of them that a sample tries."""


@pytest.mark.parts(4)
@pytest.mark.parametrize(("options", "wishes"), QUESTIONS, ids=lambda each: "-".join(str(v) for v in each.values()))
def test_no_estimate_is_below_its_bound(options: dict[str, Any], wishes: dict[str, Any], draw: Draw) -> None:
    asked = ask(**options)
    workload = asked.workload
    request = Request(method=asked.request.method, sp=None, tp=None, **wishes)
    candidates = space(workload, request)
    for each in draw(random.Random(0).sample(candidates, min(SAMPLES, len(candidates))), DRAWN):
        configuration = each.configuration(workload.model)
        least, memory = bound(workload, each.way), assess(workload, configuration).memory
        assert least.device_bytes(each.micro_batch, each.grad_accum) <= memory.device_bytes_per_gpu, configuration
        assert least.host_bytes <= memory.host_bytes_per_node, configuration
        assert least.load_bytes in (0, memory.load.device_bytes_per_gpu), configuration


def test_bounds_are_near_enough_to_exclude(draw: Draw) -> None:
    asked = ask(model="qwen3-32b", gpus=16)
    compared = 0
    for each in draw(space(asked.workload, asked.request), COMPARED):
        found = assess(asked.workload, each.configuration(asked.workload.model)).memory.device_bytes_per_gpu
        if found > asked.workload.cluster.gpu.memory_bytes / 4:  # below that, buckets and gathered layers prevail
            assert bound(asked.workload, each.way).device_bytes(each.micro_batch, each.grad_accum) > 0.4 * found
            compared += 1
    assert compared > 2
