"""The metrics of one logging window, and the names of their curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.integration_utils import rewrite_logs

from dstrain.choices import Method, Precision, SwanLabMode
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.monitor.metrics import (
    CURVES,
    Hardware,
    Reading,
    hardware,
    points,
    scalars,
    summarize,
    tag_of,
    without_nonfinite,
)
from dstrain.monitor.sinks.registry import open_sinks
from dstrain.monitor.sinks.sink import End, Setup
from dstrain.monitor.windows import measurement
from dstrain.units import GIB

NAN = float("nan")
ONE = Reading(
    tokens=1000,
    padding=0,
    squared_tokens=1000 * 100,
    window_s=2,
    wait_s=0,
    peak_bytes=NAN,
    reserved_bytes=NAN,
    outside_bytes=NAN,
    alloc_retries=0,
    gpu_utilization=NAN,
    gpu_power_w=NAN,
    host_bytes=1,
    host_used_share=0.5,
)
GPU = Gpu(
    name="x",
    aliases=(),
    memory_mib=1,
    bf16_flops_per_s=1e6,
    fp16_flops_per_s=0,
    fp32_flops_per_s=0,
    hbm_bytes_per_s=1,
    link="x",
    compute_capability=(8, 0),
    has_flash_attention_2=True,
    has_peer_access=True,
    source="none",
)
MODEL = ModelFacts(
    name="m",
    source="m",
    model_type="qwen3",
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    v_head_dim=4,
    rotary_dim=4,
    intermediate_size=16,
    vocab_size=10,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    has_qk_norm=False,
    dtype="bfloat16",
    moe=None,
    vision=None,
    tensors=(TensorGroup(name="w", kind=Kind.MLP, shape=(10, 10), count=1, is_linear=True),),
)


def test_mfu_is_six_flops_a_parameter_and_causal_attention_over_the_peak() -> None:
    against = hardware(MODEL, GPU, method=Method.FULL, precision=Precision.BF16)
    found = summarize([ONE, ONE], steps=1, against=against)
    per_token = 6 * 100 + 6 * 2 * 2 * 4 * 100  # samples of 100 tokens
    assert found["mfu"] == pytest.approx(per_token * 2000 / 2 / 2 / 1e6)


def test_an_adapter_counts_four_flops_a_parameter() -> None:
    full = hardware(MODEL, GPU, method=Method.FULL, precision=Precision.BF16)
    lora = hardware(MODEL, GPU, method=Method.LORA, precision=Precision.BF16)
    assert full is not None and lora is not None
    assert lora.flops_per_token / full.flops_per_token == pytest.approx(4 / 6)


def test_an_unknown_peak_gives_no_mfu_instead_of_a_guess() -> None:
    assert hardware(MODEL, GPU, method=Method.FULL, precision=Precision.FP16) is None
    assert "mfu" not in summarize([ONE], steps=1, against=None)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{}, {"window_s": 4}], {"tokens_per_s": 500, "step_s": 2}),  # the slowest rank gives the time
        ([{}, {"wait_s": 1}], {"data_wait_share": 0.5}),  # and the one that waits longest the share of waiting
        (
            [{"peak_bytes": 10, "reserved_bytes": 12}, {"peak_bytes": 20, "reserved_bytes": 30}],
            {"peak_bytes_per_gpu": 20, "peak_bytes_by_rank": [10, 20]},
        ),
        ([{}, {"gpu_utilization": 0.5}], {"gpu_utilization": 0.5}),  # the other GPU does not answer
        ([{}], {"peak_bytes_per_gpu": None}),  # without a GPU
    ],
)
def test_a_window_of_several_ranks(ranks: list[dict[str, float]], expected: dict[str, Any]) -> None:
    found = summarize([replace(ONE, **rank) for rank in ranks], steps=2 if len(ranks) > 1 else 1, against=None)
    assert {name: found.get(name) for name in expected} == expected


def test_each_rank_has_what_a_calibration_compares() -> None:
    one = replace(ONE, peak_bytes=10, reserved_bytes=12, outside_bytes=3, wait_s=1)
    found = summarize([one, replace(one, reserved_bytes=14, outside_bytes=4, wait_s=0)], steps=2, against=None)
    assert (found["reserved_bytes_by_rank"], found["outside_bytes_by_rank"]) == ([12, 14], [3, 4])
    assert found["data_wait_s_by_rank"] == [0.5, 0]
    result = measurement([{"step": 2, **found}, {"step": 4, **found}])
    assert [(rank.reserved_bytes, rank.outside_bytes, rank.data_wait_s) for rank in result.ranks] == [
        (12, 3, 0.5),
        (14, 4, 0),
    ]
    assert (result.windows, result.steps, result.step_s) == (1, 2, 1)


def test_a_window_without_tokens_is_no_division_by_zero() -> None:
    empty = replace(ONE, tokens=0, squared_tokens=0, window_s=0)
    against = Hardware(flops_per_token=1, flops_per_token_and_context=1, flops_per_s=1)
    assert summarize([empty], steps=0, against=against)["tokens_per_s"] == 0


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null_with_its_name(value: float) -> None:
    found = without_nonfinite({"loss": value, "list": [value, 1.0]})
    assert found == {"loss": None, "loss_nonfinite": str(value), "list": [None, 1.0]}
    json.dumps(found, allow_nan=False)


def test_only_numbers_are_drawn() -> None:
    assert scalars({"loss": 1.5, "step": 2, "by_rank": [1], "word": "x", "flag": True}) == {"loss": 1.5, "step": 2}


def test_clocks_and_power_of_each_gpu_are_known_only_if_every_rank_knows_them() -> None:
    rank = replace(ONE, gpu_utilization=0.9, gpu_power_w=300.0, gpu_power_limit_w=600.0, gpu_clock_mhz=1800.0)
    window = summarize([rank, replace(rank, gpu_power_w=150.0, gpu_clock_mhz=900.0)], steps=1, against=None)
    assert window["gpu_clock_mhz_by_rank"] == [1800.0, 900.0]
    assert window["gpu_power_w_by_rank"] == [300.0, 150.0]
    assert (window["gpu_power_share"], window["gpu_power_w"], window["gpu_utilization"]) == (0.375, 225.0, 0.9)
    assert not {"gpu_clock_mhz_by_rank", "gpu_power_share"} & summarize([rank, ONE], steps=1, against=None).keys()


TRAINERS = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_runtime", "test_loss", "rewards/margins")
NIGHT = Path(__file__).parents[1] / "report" / "night" / "metrics.jsonl"


def test_what_transformers_logs_has_the_names_of_its_callbacks() -> None:
    assert [tag_of(name) for name in TRAINERS] == list(rewrite_logs(dict.fromkeys(TRAINERS)))


def test_each_curve_has_a_name_of_its_own_in_a_section() -> None:
    tags = [curve.tag for curve in CURVES.values()]
    assert len(set(tags)) == len(tags)
    assert {tag.split("/")[0] for tag in tags} == {"train", "speed", "memory", "rows", "experts"}
    assert all("bytes" not in tag for tag in tags)


def test_every_metric_of_a_run_is_in_the_table() -> None:
    lines = [json.loads(line) for line in NIGHT.read_text().splitlines()]
    logged = {name for line in lines if "event" not in line for name in scalars(line) if not name.startswith("eval_")}
    assert logged - CURVES.keys() <= {"step", "start_step", "time_s"}  # they place a point


def test_tensorboard_has_the_loss_first_and_memory_in_gib(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    setup = Setup(project="p", name="n", mode=SwanLabMode.OFFLINE, run_dir=tmp_path, config={}, is_resumed=False)
    (sink,) = open_sinks(["tensorboard"], setup, lambda line: None)
    sink.log(points({"aside_s": 1.0, "host_bytes_max": 3 * GIB, "loss": 2.0}), 7)
    sink.finish(End.SUCCESS)
    (file,) = (tmp_path / "tensorboard").glob("*/events.*")
    read = events.EventAccumulator(str(file))
    read.Reload()
    assert read.Tags()["scalars"] == ["train/loss", "speed/aside_s", "memory/host_gib_max"]
    assert [(one.step, one.value) for one in read.Scalars("memory/host_gib_max")] == [(7, 3.0)]
