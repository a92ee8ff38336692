"""Bytes and kernels of the layers, against traces of Transformers' own code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.pytorch.sharding import with_states
from benchmarks.published.training_code import TORCHTUNE, UNSLOTH, UNSLOTH_ADAPTER_COSTS, StateDtypes
from dstrain.choices import Method, Precision
from dstrain.facts import probe
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.speed.traffic import Pass, work
from dstrain.plan.training_code import TrainingCode

TRACED = {
    "llama-3.1-8b": ((591, 1332, 1899), (38, 71, 107)),
    "qwen3-8b": ((756, 1788, 2520), (54, 103, 155)),
    "qwen3-32b": ((1205, 2781, 3955), (54, 103, 155)),
    "qwen3-30b-a3b": ((702, 1715, 2302), (73, 126, 196)),
}
"""Of one layer: kB of a token in the forward pass, the backward pass, and that with recomputation; kernels of the same.
Source: every kernel's inputs and outputs in a trace of Transformers 5.23's layers on meta tensors, products and
attention left out of the bytes."""

ADAPTED = Lora(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
INPUTS, OUTPUTS = 4 * 4096, 2 * 4096 + 2 * 1024
"""Widths of what goes into and comes out of the four linears of Llama-3.1-8B's attention."""


def _bytes(part: Pass) -> float:
    return part.bytes_per_token + part.sharded_bytes_per_token


@pytest.mark.parametrize("name", TRACED)
def test_bytes_of_a_layer_are_those_of_the_trace(name: str) -> None:
    model = probe.read_model(name)
    done, layers = work(model, DEFAULTS), model.num_hidden_layers

    forward, backward, again = (_bytes(part) / layers / 1e3 for part in (done.forward, done.backward, done.recompute))

    assert (forward, backward, backward + again) == pytest.approx(TRACED[name][0], rel=0.05)


@pytest.mark.parametrize("name", TRACED)
def test_kernels_of_a_layer_are_those_of_the_trace(name: str) -> None:
    model = probe.read_model(name)
    done, layers = work(model, DEFAULTS), model.num_hidden_layers

    forward, backward, again = (part.kernels / layers for part in (done.forward, done.backward, done.recompute))

    assert (forward, backward, backward + again) == pytest.approx(TRACED[name][1], rel=0.06)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_liger_moves_about_a_third_of_what_eager_layers_do(name: str) -> None:
    model = probe.read_model(name)
    eager, fused = work(model, DEFAULTS), work(model, changed(DEFAULTS, liger=True))

    share = (_bytes(fused.forward) + _bytes(fused.backward)) / (_bytes(eager.forward) + _bytes(eager.backward))
    assert 0.2 < share < 0.4


def test_parts_that_liger_does_not_replace_cost_what_they_did() -> None:
    model = probe.read_model("qwen3-8b")
    eager, rotated, whole = (
        work(replace(model, model_type=family), changed(DEFAULTS, liger=True)).forward
        for family in ("qwen2_moe", "glm4", "qwen3")
    )
    widths = 36 * (32 + 8) * 128
    assert _bytes(rotated) - _bytes(whole) == widths * (20 - 4)
    assert _bytes(eager) == _bytes(work(model, DEFAULTS).forward)


def test_unsloth_replaces_norms_and_rotary_embedding_alone() -> None:
    model = probe.read_model("llama-3.1-8b")
    ways: list[dict[str, Any]] = [{}, {"code": TrainingCode(fused=UNSLOTH)}, {"liger": True}]
    eager, unsloth, liger = (_bytes(work(model, changed(DEFAULTS, **kernels)).forward) for kernels in ways)

    gated = 14336 * 32 * (10 - 6)
    assert unsloth == liger + gated < eager


@pytest.mark.parametrize(
    ("lora", "states", "forward", "backward"),
    [
        (ADAPTED, StateDtypes.MIXED, 2 * INPUTS + 12 * OUTPUTS, 10 * INPUTS + 8 * OUTPUTS),
        (replace(ADAPTED, dropout=0.1), StateDtypes.MIXED, 7 * INPUTS + 12 * OUTPUTS, 15 * INPUTS + 8 * OUTPUTS),
        (ADAPTED, StateDtypes.PURE_BF16, 10 * INPUTS + 28 * OUTPUTS, 20 * INPUTS + 28 * OUTPUTS),
    ],
    ids=["bf16", "dropout", "fp32"],
)
def test_adapters_add_what_the_trace_of_peft_adds(
    lora: Lora, states: StateDtypes, forward: float, backward: float
) -> None:
    model = probe.read_model("llama-3.1-8b")
    adapted = changed(DEFAULTS, method=Method.LORA, lora=lora, code=with_states(DEFAULTS.code, states))
    without = changed(adapted, lora=replace(lora, targets=()))

    with_adapter, bare = work(model, adapted), work(model, without)

    assert (_bytes(with_adapter.forward) - _bytes(bare.forward)) / 32 == pytest.approx(forward)
    assert (_bytes(with_adapter.backward) - _bytes(bare.backward)) / 32 == pytest.approx(backward)


def test_torchtune_keeps_adapters_in_the_models_precision() -> None:
    model = probe.read_model("llama-3.1-8b")
    adapted = changed(DEFAULTS, method=Method.LORA, lora=ADAPTED)

    tune = work(model, changed(adapted, code=with_states(TORCHTUNE, StateDtypes.PURE_BF16)))

    assert _bytes(tune.forward) == _bytes(work(model, adapted).forward)


def test_fused_adapters_are_no_modules_and_update_in_place() -> None:
    model = probe.read_model("llama-3.1-8b")
    code = TrainingCode(adapter_costs=UNSLOTH_ADAPTER_COSTS)
    adapted = changed(DEFAULTS, method=Method.QLORA, lora=ADAPTED, code=code)
    bare = work(model, changed(adapted, lora=replace(ADAPTED, targets=())))

    fused = work(model, adapted)

    assert fused.num_adapters == 0
    assert (_bytes(fused.forward) - _bytes(bare.forward)) / 32 == pytest.approx(2 * INPUTS + 4 * OUTPUTS)


def test_an_fp32_residual_stream_is_twice_as_wide_and_cast_at_every_4_bit_linear() -> None:
    model = probe.read_model("llama-3.1-8b")
    bf16 = changed(DEFAULTS, method=Method.QLORA, lora=Lora(targets=()))
    plain, wide = work(model, bf16), work(model, changed(bf16, code=TrainingCode(has_fp32_residual=True)))

    norms = 36 * 4096 * 65
    casts = 6 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * (4096 + 14336)) * 32
    assert _bytes(wide.forward) == pytest.approx(2 * _bytes(plain.forward) - norms + casts)


def test_a_frozen_model_has_no_gradients_of_norms() -> None:
    model = probe.read_model("llama-3.1-8b")
    frozen = work(model, changed(DEFAULTS, method=Method.LORA, lora=Lora(targets=())))

    assert _bytes(work(model, DEFAULTS).backward) - _bytes(frozen.backward) == 8 * 4096 * (2 * 32 + 1)


@pytest.mark.parametrize(
    "configuration",
    [DEFAULTS, changed(DEFAULTS, liger=True), changed(DEFAULTS, precision=Precision.FP32)],
    ids=["eager", "liger", "fp32"],
)
def test_the_sums_of_a_model_are_computed_once(configuration: Configuration) -> None:
    model = probe.read_model("llama-3.1-8b")

    assert work(model, configuration) is work(model, changed(configuration, micro_batch=7))
