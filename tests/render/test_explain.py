"""What the explanations of keys and files are made of."""

from __future__ import annotations

from typing import Any

import pytest
from cases import ask

from dstrain.errors import InvalidConfig
from dstrain.plan.estimate import effective
from dstrain.render.explain_file import sections
from dstrain.render.explain_key import COUNTED, OF_JOB, Here, ways
from dstrain.render.key_cost import Scale, cost
from dstrain.render.keys.key import Kind
from dstrain.render.keys.table import KEYS, ROWS
from dstrain.render.merge import Change, applied
from dstrain.render.named import named
from dstrain.render.templates import reasons_in, template_names

WHOLE: dict[str, Any] = {
    "data_types": {"grad_accum_dtype": "fp32"},
    "tensor_parallel": {"autotp_size": 1},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0, "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
}
OTHER = {
    "zero_optimization.stage": 1,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_param.device": "none",
    "tensor_parallel.autotp_size": 2,
    "data_types.grad_accum_dtype": "bf16",
}


def test_the_planner_reads_exactly_the_keys_that_are_counted() -> None:
    asked = ask(model="qwen3-8b", gpus=8)
    before = effective(asked.model, asked.request, WHOLE)
    for key in ROWS:
        if key.kind is Kind.OBJECT or "*" in key.path or key.removed is not None or key.path in OF_JOB:
            continue
        value = OTHER.get(key.path, not key.default if key.kind is Kind.BOOL else 7)
        changed = applied(WHOLE, [Change(pointer=tuple(key.path.split(".")), value=value)])
        is_counted = (key.alias_of or key.path) in COUNTED
        assert (effective(asked.model, asked.request, changed) != before) == is_counted, key.path


def test_another_name_of_a_key_is_estimated_as_the_key() -> None:
    asked = ask(model="qwen3-8b", gpus=8, zero_stage=3, seq_len=2048, micro_batch=1)
    here = Here(config=WHOLE, request=asked.request, model=asked.model, cluster=asked.cluster)
    found = ways(KEYS["zero_optimization", "prefetch_bucket_size"], here, None)
    assert found == ways(KEYS["zero_optimization", "stage3_prefetch_bucket_size"], here, None)
    assert len(found) > 1


def test_every_key_is_found_by_its_path_and_its_pointer() -> None:
    for key in ROWS:
        assert named(key.path)[1] == key
        assert named("/" + key.path.replace(".", "/"))[1] == key


def test_the_end_of_one_path_is_enough_and_of_several_is_refused_with_all_of_them() -> None:
    assert named("offload_param.device")[1].path == "zero_optimization.offload_param.device"
    with pytest.raises(InvalidConfig, match=r"(?s)several keys.*offload_optimizer.device.*offload_param.device"):
        named("device")


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("zero_optimization.reduce_bucket_size", 5e8, 2 * 2 * 500_000_000),
        ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000, 2 * 50_000_000),
        ("zero_optimization.sub_group_size", 1e9, 4 * 600_000_000),
        ("zero_optimization.stage3_max_live_parameters", 1e9, 2 * 600_000_000),
        ("aio.block_size", 1_048_576, 1_048_576),
    ],
)
def test_a_size_in_elements_is_bytes_and_never_more_than_the_model(path: str, value: float, wanted: int) -> None:
    found = cost(path, value, WHOLE, Scale(element_bytes=2, num_params=600_000_000))
    assert found is not None
    assert found.count_bytes == wanted


@pytest.mark.parametrize("value", [True, "auto", None, {}, []])
def test_what_is_no_number_has_no_cost(value: Any) -> None:
    assert cost("zero_optimization.reduce_bucket_size", value, WHOLE, Scale(element_bytes=2, num_params=None)) is None


@pytest.mark.parametrize("config", [{}, {"zero_optimization": True}, {"zero_optimization": 3, "bf16": []}, {"x": {}}])
def test_any_object_has_sections(config: dict[str, Any]) -> None:
    found = sections(config, filled={}, by=Scale(element_bytes=2, num_params=None), estimate=None)
    assert len([entry for section in found for entry in section.entries]) == len(config)


def test_a_template_says_why_it_writes_a_size() -> None:
    for name in template_names():
        assert {"overlap_comm", "reduce_bucket_size"} <= set(reasons_in(name)), name
