"""Matrix products against the parameters that they multiply by."""

from __future__ import annotations

import pytest

from dstrain.choices import Method, Precision
from dstrain.facts import probe
from dstrain.facts.cluster import gpus
from dstrain.facts.model.model_facts import Kind
from dstrain.plan.speed.flops import flops_per_token, peak_flops_per_s, products

MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gemma-3-27b")


@pytest.mark.parametrize("name", MODELS)
def test_products_of_a_token_are_a_third_of_its_flops(name: str) -> None:
    model = probe.read_model(name)

    forward = sum(
        2 * product.inputs * product.outputs * product.count * product.rows_per_token
        for product in products(model, method=Method.FULL)
        if not product.is_vision
    )

    assert forward == pytest.approx(flops_per_token(model, method=Method.FULL, seq_len=0) / 3, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_checkpointing_computes_all_of_a_dense_layer_but_its_last_product_again(name: str) -> None:
    model = probe.read_model(name)
    again = [p for p in products(model, method=Method.FULL) if p.is_in_layer and not p.is_last]

    last = model.hidden_size * model.intermediate_size * model.num_hidden_layers
    inside = model.num_params_of(Kind.ATTENTION, Kind.MLP)
    assert sum(product.num_params for product in again) == inside - last


def test_qlora_keeps_the_linears_of_the_layers_in_4_bits_and_not_the_head() -> None:
    model = probe.read_model("llama-3.1-8b")
    quantised = [p for p in products(model, method=Method.QLORA) if p.is_quantized]

    assert sum(product.num_params for product in quantised) == model.num_params_of(Kind.ATTENTION, Kind.MLP)


def test_a_tied_head_multiplies_too() -> None:
    model = probe.read_model("qwen3-0.6b")

    assert any(product.outputs == model.vocab_size for product in products(model, method=Method.FULL))


def test_a_gpu_without_bf16_has_no_peak_in_it() -> None:
    assert peak_flops_per_s(gpus.gpu("v100"), Precision.BF16) == 0
    assert peak_flops_per_s(gpus.gpu("v100"), Precision.FP16) == 125e12
