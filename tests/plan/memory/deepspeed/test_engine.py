"""The engine's replay by hand arithmetic; tests/train/test_engine_memory.py holds it against DeepSpeed itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from dstrain.choices import LossKernel, Method, Offload, Optimizer, Precision
from dstrain.config.key_bytes import Scale, cost
from dstrain.facts.model.families import from_config
from dstrain.facts.model.model_facts import Kind
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.labels import title
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.deepspeed.engine import peak_tensors
from dstrain.plan.memory.deepspeed.timeline import Part, Timeline, spans
from dstrain.plan.memory.zero import bucket_bytes
from tests.train.engine_cases import DEEP, LLAMA, SPARSE, TIED

MODEL = from_config({**LLAMA, "vocab_size": 4096, "num_hidden_layers": 6}, name="llama", source="llama")
P = MODEL.num_params
SMALL = changed(DEFAULTS, seq_len=64, reduce_bucket_size=100_000, param_persistence_threshold=0)


def held(**options: object) -> int:
    return engine.engine_of(MODEL, changed(SMALL, **options), 2).resident.total  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "bytes_per_param"), [(0, 14), (1, 2 + 12 / 2), (2, 2 + 12 / 2), (3, 16 / 2)], ids=lambda value: str(value)
)
def test_what_is_held_between_steps_is_the_textbooks_and_a_bucket_under_zero_3(
    stage: int, bytes_per_param: float
) -> None:
    bucket = 2 * 100_000 if stage == 3 else 0
    assert held(zero_stage=stage) == pytest.approx(bytes_per_param * P + bucket, rel=5e-3)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_param"),
    [
        (Optimizer.ADAMW, 8),
        (Optimizer.ADAMW_8BIT, 2.03),
        (Optimizer.ADAMW_BF16, 2),  # and master weights of 2 bytes, not 4
        (Optimizer.LION, 4),
        (Optimizer.SGD, 0),
    ],
)
def test_optimizers_differ_in_their_states(optimizer: Optimizer, bytes_per_param: float) -> None:
    expected = 2 * P + (4 + bytes_per_param) * P / 2
    assert held(zero_stage=2, optimizer=optimizer) == pytest.approx(expected, rel=5e-3)


def test_a_quantized_linear_layer_takes_4_bits_an_element_and_scales() -> None:
    groups = [group for group in MODEL.tensors if group.is_linear and group.kind is not Kind.HEAD]
    saved = held(zero_stage=2, method=Method.LORA) - held(zero_stage=2, method=Method.QLORA)
    assert saved == pytest.approx((2 - 4 / 8 - 1 / 64) * sum(group.numel * group.count for group in groups), rel=1e-3)


def test_fp32_accumulation_costs_zero_1_a_whole_fp32_gradient() -> None:
    wide = held(zero_stage=1, grad_accum_dtype=Precision.FP32)
    assert wide - held(zero_stage=1) == pytest.approx(4 * P, rel=1e-3)


def test_an_offloaded_ratio_of_sub_groups_leaves_the_others_states_and_gradients_here() -> None:
    whole = held(zero_stage=3, offload=Offload.OPTIMIZER, sub_group_size=100_000)
    half = held(zero_stage=3, offload=Offload.OPTIMIZER, sub_group_size=100_000, offload_ratio=0.5)
    assert half - whole == pytest.approx(16 * P / 2 / 2, rel=0.2)


def test_accumulating_doubles_the_gradient_partition_of_zero_2() -> None:
    def grads(**options: object) -> int:
        way = changed(SMALL, zero_stage=2, **options)  # type: ignore[arg-type]
        return max(each.engine[Part.GRADS] for each in engine.instants(MODEL, way, 2))

    assert grads(grad_accum=2) - grads() == pytest.approx(P, rel=0.15)


def test_zero_1_holds_the_full_gradient_in_the_backward_pass() -> None:
    way = changed(SMALL, zero_stage=1, overlap_comm=False, reduce_bucket_size=10**8)
    instants = engine.instants(MODEL, way, 2)
    assert max(each.engine[Part.GRADS] for each in instants) == pytest.approx(2 * P, rel=0.01)


def test_a_smaller_sub_group_makes_the_step_smaller_under_zero_3() -> None:
    def most(sub_group_size: int) -> int:
        instants = engine.instants(MODEL, changed(SMALL, zero_stage=3, sub_group_size=sub_group_size), 2)
        return max(each.engine[Part.BUFFERS] for each in instants if each.name == "optimizer step")

    assert most(10**9) == pytest.approx(6 * P / 2, rel=0.01)
    assert most(100_000) == 8 * MODEL.largest_tensor_numel // 2, "the norm of the largest share in fp64"


@pytest.mark.parametrize("reuse", [0, 500_000, 10_000_000])
def test_zero_3_keeps_no_more_gathered_than_it_may_and_a_module(reuse: int) -> None:
    model = from_config(DEEP, name="deep", source="deep")
    way = changed(
        SMALL, zero_stage=3, prefetch_bucket_size=100_000, max_live_parameters=600_000, max_reuse_distance=reuse
    )
    gathered = max(each.engine[Part.GATHERED] for each in engine.instants(model, way, 2))
    limit = 600_000 + 100_000 + model.largest_tensor_numel
    assert gathered <= 2 * (2 * limit + min(reuse, model.num_params))


def test_one_rank_has_every_parameter_and_gathers_nothing() -> None:
    way = changed(SMALL, zero_stage=3)
    assert all(each.engine[Part.GATHERED] == 0 for each in engine.instants(MODEL, way, 1))


@pytest.mark.parametrize(("stage", "overlaps"), [(1, True), (2, False), (2, True), (3, True)])
def test_buckets_take_what_explain_and_lint_say_of_them(stage: int, overlaps: bool) -> None:
    way = changed(SMALL, zero_stage=stage, overlap_comm=overlaps, reduce_bucket_size=3_000_000)
    resident = engine.engine_of(MODEL, way, 2).resident.buffers
    instants = engine.instants(MODEL, way, 2)
    most = max(each.engine[Part.BUFFERS] for each in instants if each.name == "gradient reduction")
    assert resident + most == pytest.approx(bucket_bytes(way, P), rel=0.05)
    config = {"zero_optimization": {"stage": stage, "overlap_comm": overlaps}}
    by = Scale(precision=way.model.precision, num_params=P, num_trainable=P)
    said = cost("zero_optimization.reduce_bucket_size", way.zero.reduce_bucket_size, config, by)
    assert said is not None
    assert said.count_bytes == bucket_bytes(way, P)


WAYS = [
    changed(SMALL, zero_stage=stage, grad_ckpt=ckpt, grad_accum=accum, method=method, lora=Lora(dropout=0.0))
    for stage, ckpt, accum, method in product(range(4), (False, True), (1, 2), (Method.FULL, Method.LORA))
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{title(way)}, {way.step.grad_accum}, {way.model.method}")
@pytest.mark.parametrize("config", [LLAMA, TIED, SPARSE], ids=["llama", "tied", "sparse"])
def test_the_parts_sum_to_the_peak(config: dict[str, object], way: Configuration) -> None:
    model = from_config(config, name="model", source="model")
    found = engine.peak(model, way, 4)
    most = max(each.total for each in engine.instants(model, way, 4))
    assert found.total == most + engine.engine_of(model, way, 4).resident.total


def test_a_span_has_the_most_between_two_marks_with_its_parts() -> None:
    timeline = Timeline()
    timeline.add(Part.GRADS, 4)
    gradient = timeline.add(Part.GRADS, 1)
    timeline.add(Part.GRADS, 0)
    timeline.passing(Part.BUFFERS, 3)
    timeline.remove(gradient)
    taken = [(0, Part.GRADS, 4, None), (1, Part.GRADS, 1, None), (3, Part.BUFFERS, 3, None)]
    assert timeline.events == [*taken, (3, Part.BUFFERS, -3, None), (1, Part.GRADS, -1, None)]
    nothing, left = (0, 0, 0), (4, 0, 0)
    assert spans(timeline.events, [5, 5]) == [(nothing, (5, 3, 0)), (left, left), (left, left)]


def test_a_span_has_the_blocks_of_its_rank() -> None:
    timeline = Timeline()
    gradient = timeline.add(Part.GRADS, 4)
    timeline.passing(Part.BUFFERS, 3, 1)
    timeline.remove(gradient, 0)
    timeline.add(Part.STATES, 9)
    assert [high for _, high in spans(timeline.events, [4], 0)] == [(4, 0, 0), (0, 0, 0)]
    assert [high for _, high in spans(timeline.events, [4], 1)] == [(4, 3, 0), (4, 0, 0)]


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 2},
        {"zero_stage": 3, "grad_ckpt": True, "expandable_segments": True, "num_hidden_layers": 24},
        {"zero_stage": 2, "grad_ckpt": True, "loss": LossKernel.FULL, "micro_batch": 4, "grad_accum": 2},
        {"zero_stage": 3, "method": Method.LORA, "micro_batch": 4, "loss": LossKernel.CHUNKED},
        {"zero_stage": 1, "grad_ckpt": True, "grad_ckpt_every_n_layers": 2, "tiled_mlp": True, "micro_batch": 8},
        # has tensors without bytes
        {"zero_stage": 2, "grad_ckpt": True, "loss": LossKernel.FUSED, "micro_batch": 2, "model_type": "deepseek_v2"},
    ],
    ids=str,
)
def test_named_tensors_at_the_peak_are_all_of_the_tapes_bytes(options: dict[str, Any]) -> None:
    shape = {"vocab_size": 4096, "num_hidden_layers": 6} | {key: options[key] for key in options if key in LLAMA}
    model = from_config({**SPARSE, **LLAMA, **shape}, name="model", source="model")
    configuration = changed(SMALL, seq_len=1024, **{key: options[key] for key in options if key not in LLAMA})
    top = max(engine.instants(model, configuration, 2), key=lambda instant: instant.total)
    named = peak_tensors(model, configuration, 2)
    assert sum(one.size_bytes * one.count for one in named) == sum(top.tape) > 0
    sizes = [one.size_bytes * one.count for one in named]
    assert sizes == sorted(sizes, reverse=True)


def test_names_are_those_of_the_modules_that_allocate() -> None:
    tokens, vocabulary, layers = 4 * 1024, MODEL.vocab_size, MODEL.num_hidden_layers
    way = changed(SMALL, seq_len=1024, zero_stage=2, micro_batch=4)
    kept, whole = (
        {(one.name, one.size_bytes): one.count for one in peak_tensors(MODEL, changed(way, **options), 2)}  # type: ignore[arg-type]
        for options in ({"grad_ckpt": True, "loss": LossKernel.FULL}, {"loss": LossKernel.CHUNKED})
    )
    assert kept["after mlp.down_proj", 2 * tokens * MODEL.hidden_size] >= layers, "inputs of layers"
    assert kept["loss", 4 * tokens * vocabulary] == 1, "log-softmax in fp32"
    assert kept["loss, backward", 4 * tokens * vocabulary] == 2, "its gradient and that of the logits"
    assert whole["lm_head", 2 * tokens * vocabulary] == 1, "logits"
    assert whole["mlp.gate_proj", 2 * tokens * LLAMA["intermediate_size"]] == layers


def test_the_optimizer_step_has_no_tensors_of_a_micro_batch() -> None:
    short = changed(SMALL, seq_len=16, zero_stage=2)
    assert max(engine.instants(MODEL, short, 2), key=lambda instant: instant.total).name == "optimizer step"
    assert peak_tensors(MODEL, short, 2) == ()
