"""The parts of the explanations of keys and files."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import ask
from hypothesis import example, given
from hypothesis import strategies as st

from dstrain.choices import Precision
from dstrain.cli.output import explain_file as file_text
from dstrain.config.explain import COUNTED, Chosen, Here, estimate_of, find_job_keys, job_keys, sections, ways, why
from dstrain.config.jsonc import Change, applied
from dstrain.config.key_bytes import Scale, cost
from dstrain.config.keys import KEYS, ROWS, Kind, named
from dstrain.config.lint.rule import JobContext
from dstrain.config.resolve_auto import REPEATED_KEYS
from dstrain.config.templates import reasons_in, template_names
from dstrain.errors import InvalidConfig
from dstrain.plan.configuration import BF16_STATES, DEFAULTS
from dstrain.plan.estimate import effective
from dstrain.plan.estimate_records import Reason, Topic

WHOLE: dict[str, Any] = {
    "bf16": dict.fromkeys(BF16_STATES, True),
    "data_types": {"grad_accum_dtype": "fp32"},
    "tensor_parallel": {"autotp_size": 1},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0, "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
}
OTHER = {
    "optimizer.type": "Lion",
    **dict.fromkeys((f"bf16.{key}" for key in BF16_STATES), False),
    "zero_optimization.stage": 1,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_param.device": "none",
    "data_types.grad_accum_dtype": "bf16",
}


LEAVES: list[Any] = [None, True, False, 0, -1, 1, 3, 7, 0.5, -1e308, 1e308, float("inf"), float("nan"), 10**400]
LEAVES += ["", "auto", "cpu", "nvme", "3", "1e400", [], {}, [{}]]
"""Values that a hand edit may leave at a key of another type."""


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Returns a configuration with a few keys of DeepSpeed, most of ZeRO, that hold anything."""
    whole: dict[str, Any] = {"zero_optimization": {"stage": draw(st.sampled_from([*LEAVES, 2, 3]))}}
    paths = [key.path for key in ROWS if key.removed is None and "*" not in key.path]
    often = [path for path in paths if path.startswith("zero_optimization")]
    for path in draw(st.lists(st.sampled_from(often) | st.sampled_from(paths), max_size=4)):
        change = Change(pointer=tuple(path.split(".")), value=draw(st.sampled_from(LEAVES)))
        with suppress(AttributeError, KeyError, TypeError, IndexError):  # inside something that is no object
            whole = applied(whole, [change])
    return whole


def test_the_planner_reads_exactly_the_keys_that_are_counted() -> None:
    asked = ask(model="qwen3-8b", gpus=8)
    before = effective(asked.workload.model, asked.request, WHOLE)
    for key in ROWS:
        if key.kind is Kind.OBJECT or "*" in key.path or key.removed is not None or key.path in REPEATED_KEYS:
            continue
        value = OTHER.get(key.path, not key.default if key.kind is Kind.BOOL else 7)
        changed = applied(WHOLE, [Change(pointer=tuple(key.path.split(".")), value=value)])
        is_counted = (key.alias_of or key.path) in COUNTED
        assert (effective(asked.workload.model, asked.request, changed) != before) == is_counted, key.path


def test_another_name_of_a_key_is_estimated_as_the_key() -> None:
    asked = ask(model="qwen3-8b", gpus=8, zero_stage=3, seq_len=2048, micro_batch=1)
    here = Here(config=WHOLE, request=asked.request, workload=asked.workload)
    found = ways(KEYS["zero_optimization", "prefetch_bucket_size"], here, None)
    assert found == ways(KEYS["zero_optimization", "stage3_prefetch_bucket_size"], here, None)
    assert len(found) > 1


def test_a_reason_is_about_the_key_that_is_explained() -> None:
    buffers = Reason(
        topic=Topic.BUFFERS, text="engine buffers sized to the free memory: reduce bucket 200.0 M elements"
    )
    chosen = Chosen(config={}, configuration=DEFAULTS, reasons=(buffers,), written_because={}, fits=True)
    assert why(KEYS["zero_optimization", "reduce_bucket_size"], chosen) == [buffers.text]
    assert why(KEYS["zero_optimization", "sub_group_size"], chosen) == []


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
        ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000, 2 * 2 * 50_000_000),
        ("zero_optimization.sub_group_size", 1e9, 4 * 600_000_000),
        ("zero_optimization.stage3_max_live_parameters", 1e9, 2 * 600_000_000),
        ("aio.block_size", 1_048_576, 1_048_576),
    ],
)
def test_a_size_in_elements_is_bytes_and_never_more_than_the_model(path: str, value: float, wanted: int) -> None:
    found = cost(path, value, WHOLE, Scale(precision=Precision.BF16, num_params=600_000_000, num_trainable=600_000_000))
    assert found is not None
    assert found.count_bytes == wanted


@pytest.mark.parametrize("value", [True, "auto", None, {}, []])
def test_what_is_no_number_has_no_cost(value: Any) -> None:
    assert cost("zero_optimization.reduce_bucket_size", value, WHOLE, Scale(precision=Precision.BF16)) is None


@pytest.mark.parametrize("config", [{}, {"zero_optimization": True}, {"zero_optimization": 3, "bf16": []}, {"x": {}}])
def test_any_object_has_sections(config: dict[str, Any]) -> None:
    found = sections(config, filled={}, by=Scale(precision=Precision.BF16), estimate=None)
    assert len([entry for section in found for entry in section.entries]) == len(config)


def test_a_template_says_why_it_writes_a_size() -> None:
    for name in set(template_names()) - {"zero0.json.j2"}:  # it has no buffers
        assert {"overlap_comm", "reduce_bucket_size"} <= set(reasons_in(name)), name


@pytest.mark.sweep
@given(config=configs())
@example({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": {}}}})
@example({"zero_optimization": {"stage": 3, "reduce_bucket_size": -1e308}})
@example({"zero_optimization": {"stage": 3, "max_live_parameters": -1e308}})
@example({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "1e400"}})
def test_no_configuration_that_is_json_breaks_an_explanation(config: dict[str, Any]) -> None:
    asked = ask(model="qwen3-0.6b", gpus=8, zero_stage=3, seq_len=512, micro_batch=1)
    known = JobContext(model=asked.workload.model, cluster=asked.workload.cluster, hosts=asked.hosts)
    assert file_text.lines(file_text.explain(Path("ds_config.json"), config, known, None))
    here = Here(config=config, request=asked.request, workload=asked.workload)
    assert estimate_of(here)


def test_every_key_of_the_page_of_job_files_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \| .*? \| (.+) \|$", page, re.MULTILINE))
    assert len(rows) > 100
    for path, meaning in rows.items():
        (key,) = find_job_keys(path)
        assert (key.path, key.meaning) == (path, meaning)
    assert {path for path, key in job_keys().items() if not key.inside} - rows.keys() - {"env"} == {
        path for path in job_keys() if path.startswith("eval_data[]")
    }
