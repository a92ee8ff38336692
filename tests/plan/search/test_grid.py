"""The questions near one that was asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import ask

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster, resized
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.decide import choice, grid_axes, grid_points, survey

pytestmark = pytest.mark.commands


def shapes(clusters: tuple[Cluster, ...]) -> list[tuple[int, int]]:
    return [(cluster.num_nodes, cluster.gpus_per_node) for cluster in clusters]


@pytest.mark.parametrize(
    ("options", "gpus_per_node", "expected"),
    [
        ({"gpus": 1}, None, [(1, 1), (1, 2), (1, 4), (1, 8)]),
        ({"gpus": 16}, None, [(1, 8), (2, 8), (4, 8), (8, 8)]),
        ({"gpus": 24}, None, [(3, 8), (6, 8), (12, 8), (24, 8)]),
        ({"gpus": 2, "gpus_per_node": 1}, None, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ({"gpus": 4}, 4, [(1, 2), (1, 4), (2, 4), (4, 4)]),
    ],
)
def test_values_are_near_the_question(
    options: dict[str, int], gpus_per_node: int | None, expected: list[tuple[int, int]]
) -> None:
    inputs = ask(model="qwen3-0.6b", micro_batch=3, seq_len=16384, **options)
    asked = choice(inputs.workload, inputs.request)
    values = grid_axes(inputs.workload, inputs.request, asked, gpus_per_node=gpus_per_node)
    assert shapes(values.clusters) == expected
    assert values.seq_len == (8192, 16384, 32768)  # the model reads 40,960
    assert values.micro_batch == (None, 1, 2, 3, 4)


def test_the_machines_are_those_of_such_a_question() -> None:
    eight = ask(model="qwen3-0.6b", gpus=8, gpu="4090").workload.cluster
    for gpus in (1, 2, 16):
        assert resized(eight, gpus) == ask(model="qwen3-0.6b", gpus=gpus, gpu="4090").workload.cluster
    given = ask(model="qwen3-0.6b", gpus=8, host_memory=2**39).workload.cluster
    assert resized(given, 16).host_memory_bytes == 2**39


def test_a_point_is_an_answer_or_a_contradiction() -> None:
    inputs = ask(model="qwen3-0.6b", gpus=2, global_batch=6, zero_stage=1, grad_ckpt=False)
    first = survey(inputs.workload, inputs.request).first
    values = grid_axes(inputs.workload, inputs.request, first, gpus_per_node=None)
    grid = grid_points(inputs.workload, inputs.request, first, replace(values, seq_len=(4096,), micro_batch=(None, 1)))
    answers = {(point.cluster.num_gpus, point.micro_batch): point.answer for point in grid}
    assert answers[2, None] is first
    one = ask(model="qwen3-0.6b", gpus=1, global_batch=6, zero_stage=1, grad_ckpt=False, micro_batch=1)
    assert answers[1, 1] == survey(one.workload, one.request).first
    assert isinstance(answers[4, None], InvalidConfig)
    assert isinstance(answers[1, None], Estimate)
