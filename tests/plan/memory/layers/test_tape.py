"""What the tape says, against arithmetic by hand: bytes for each token, layer by layer. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.named_peaks import Instant, by_name, of_variant, profile, variant_of
from benchmarks.published.training_code import Loss, with_loss
from dstrain.choices import Attention, Method
from dstrain.facts.model.families import from_config
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.layers import recording
from dstrain.plan.memory.layers.attention import WIDEST_AT_ONCE
from dstrain.plan.memory.layers.context import Variant
from dstrain.plan.memory.layers.families import LAYER_CODE
from dstrain.plan.named_parts import with_frozen
from dstrain.plan.training_code import TrainingCode

H, KV, D = 8, 2, 64
h, q, k, I, V = 768, H * D, KV * D, 1536, 4096  # noqa: E741
T = 512
"""Tokens: every tensor is then a multiple of what allocations are rounded to."""
E, K, I_E = 16, 4, 384
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": h, "intermediate_size": I, "num_hidden_layers": 6, "num_attention_heads": H,
    "num_key_value_heads": KV, "head_dim": D, "max_position_embeddings": 4096, "num_experts": E,
    "num_experts_per_tok": K, "moe_intermediate_size": I_E,
}  # fmt: skip
WAY = changed(DEFAULTS, seq_len=T, attn=Attention.FLASH_ATTENTION_2)
LLAMA_LAYER = 16 * h + 8 + 4 * q + 4 * k + 4 * H + 8 * I
QWEN3_ATTENTION = 16 * h + 8 + 10 * q + 10 * k + 8 * H + 4 * KV


def model(model_type: str, **sizes: Any) -> ModelFacts:
    """Returns a small model of a family."""
    return from_config({"model_type": model_type, **SIZES, **sizes}, name=model_type, source=model_type)


def kept_per_layer(facts: ModelFacts, way: Configuration) -> float:
    """Returns the bytes for each token that one more layer leaves behind, when the loss begins."""
    variant = variant_of(way)
    fewer, more = (peaks(facts, variant, count)["loss forward"] for count in (3, 4))
    return (more - fewer) / (way.batch.micro_batch * way.batch.seq_len)


def peaks(facts: ModelFacts, variant: Variant, layers: int) -> dict[str, int]:
    """Returns the peak of each instant of a model with that many layers, all of them on the tape."""
    played = recording._played(facts, variant, {"sparse" if facts.moe else "dense": layers}, all_tiles=False)
    highest: dict[str, int] = {}
    for (name, _), parts in by_name(played.moments).items():
        highest[name] = max(highest.get(name, 0), sum(parts))
    return highest


def instant(facts: ModelFacts, way: Configuration, name: str) -> Instant:
    """Returns the highest instant of the name."""
    found = [each for each in profile(facts, way) if each.name == name]
    return max(found, key=lambda each: each.total)


@pytest.mark.parametrize(
    ("family", "num_bytes"),
    [
        ("llama", LLAMA_LAYER),
        ("mistral", LLAMA_LAYER),
        ("qwen3", QWEN3_ATTENTION + 8 * I),
        # routed rows, gate, up, activation, product; probabilities; four index tensors, three of weights, their sums
        ("qwen3_moe", QWEN3_ATTENTION + K * (4 * h + 8 * I_E) + 4 * E + 38 * K + 4),
    ],
)
def test_a_layer_keeps_what_the_closed_form_says(family: str, num_bytes: int) -> None:
    assert kept_per_layer(model(family), WAY) == num_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_recomputed_layer_keeps_its_input(family: str) -> None:
    assert kept_per_layer(model(family), changed(WAY, grad_ckpt=True)) == 2 * h


def test_published_layer_of_llama_3_8b() -> None:
    """Source: stas00/ml-engineering measured 28.0 copies of hidden × tokens in bf16 for a layer without loss.

    Transformers of that time repeated keys and values, and copied queries and output: 4q − 4k + 2q more than now.
    """
    llama = model(
        "llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    per_token = kept_per_layer(llama, WAY)
    assert per_token == 200_840
    assert (per_token + 6 * 4096 - 4 * 1024) / (2 * 4096) == pytest.approx(28.0, abs=1.1)


def test_the_losss_backward_pass_has_three_copies_in_fp32() -> None:
    found = instant(model("llama"), changed(WAY, grad_ckpt=True), "loss backward")
    assert found.logits == pytest.approx(12 * V * T, rel=0.002)


def test_a_dropped_input_costs_three_bytes_an_element() -> None:
    lora = Lora(rank=8, dropout=0.0, targets=("o_proj",))
    kept = changed(WAY, method=Method.LORA, lora=lora)
    dropped = changed(kept, lora=replace(lora, dropout=0.1))
    assert kept_per_layer(model("llama"), dropped) - kept_per_layer(model("llama"), kept) == 3 * q


def test_frozen_norms_keep_no_normalised_copy_and_frozen_linears_no_input() -> None:
    lora = changed(WAY, method=Method.LORA, lora=Lora(rank=8, targets=("q_proj",)))
    full, adapted = kept_per_layer(model("llama"), WAY), kept_per_layer(model("llama"), lora)
    # two normalised copies, the output of one norm (the other is the adapter's input), and the MLP's product
    assert full - adapted == 2 * 2 * h + 2 * h + 2 * I - 2 * 8


def test_a_padding_mask_under_sdpa_repeats_keys_and_becomes_a_bias() -> None:
    alone = changed(WAY, attn=Attention.SDPA)
    padded = changed(alone, micro_batch=2, code=TrainingCode(masks_padding=True))
    assert kept_per_layer(model("llama"), changed(alone, micro_batch=2)) == kept_per_layer(model("llama"), alone)
    more = kept_per_layer(model("llama"), padded) - kept_per_layer(model("llama"), alone)
    assert more == (4 * q - 4 * k) + 2 * T


def test_samples_of_packed_rows_are_put_together_under_sdpa_alone_where_no_kernel_attends_them_at_once() -> None:
    packed = changed(WAY, packing=True)
    by_sdpa = changed(packed, attn=Attention.SDPA)
    assert kept_per_layer(model("llama"), packed) == kept_per_layer(model("llama"), by_sdpa) == LLAMA_LAYER
    wide = model("llama", head_dim=WIDEST_AT_ONCE + 8)
    kept = {attn: kept_per_layer(wide, changed(packed, attn=attn)) for attn in Attention}
    assert kept[Attention.SDPA] == kept[Attention.FLASH_ATTENTION_2] + 2 * H * (WIDEST_AT_ONCE + 8)


def test_code_that_masks_packed_rows_repeats_keys_and_has_a_bias() -> None:
    masked = changed(WAY, packing=True, attn=Attention.SDPA, code=TrainingCode(splits_packed_rows=False))
    assert kept_per_layer(model("llama"), masked) == LLAMA_LAYER + 4 * q - 4 * k + 2 * T


def test_a_window_shorter_than_the_row_needs_a_mask_under_sdpa() -> None:
    windowed, way = model("mistral", sliding_window=T), changed(WAY, attn=Attention.SDPA)
    highest = {attn: max(each.total for each in profile(windowed, changed(way, attn=attn))) for attn in Attention}
    plain = max(each.total for each in profile(model("mistral", sliding_window=T + 1), way))
    assert highest[Attention.FLASH_ATTENTION_2] == plain < highest[Attention.SDPA] < highest[Attention.EAGER]


def test_eager_attention_keeps_its_scores() -> None:
    eager = kept_per_layer(model("llama"), changed(WAY, attn=Attention.EAGER))
    # softmax in fp32 and its copy for each head; repeated keys and values; what flash keeps of scores is not there
    assert eager == LLAMA_LAYER - 4 * H + 4 * q - 4 * k + (4 + 2) * H * T


def test_liger_keeps_a_layers_inputs_and_the_mlps_factors() -> None:
    liger = changed(WAY, liger=True, code=with_loss(WAY.code, Loss.LIGER))
    assert kept_per_layer(model("llama"), liger) == 8 * h + 8 + 4 * q + 4 * k + 4 * H + 6 * I


def test_ligers_experts_keep_nothing_behind_the_activation() -> None:
    liger = changed(WAY, liger=True, code=with_loss(WAY.code, Loss.LIGER))
    attention = 8 * h + 8 + 4 * q + 4 * k + 4 * H + (2 * q + 4 * H + 2 * k + 4 * KV)
    # gate and up; three 4-byte indices; the weight of each expert; probabilities, normalisation, the picked indices
    assert kept_per_layer(model("qwen3_moe"), liger) == attention + K * 4 * I_E + 12 * K + 2 * K + 4 * E + 12 * K + 4


def test_families_that_liger_does_not_know_run_as_they_are() -> None:
    for family in ("qwen2_moe", "glm"):
        facts = model(family, shared_expert_intermediate_size=I_E)
        assert profile(facts, changed(WAY, liger=True, code=with_loss(WAY.code, Loss.LIGER))) == profile(facts, WAY)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("grad_ckpt", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_depth_is_affine(family: str, method: Method, grad_ckpt: bool) -> None:
    """The plan's tapes are shorter than the model; a tape of the whole model says the same."""
    facts = model(family)
    variant = variant_of(changed(WAY, method=method, grad_ckpt=grad_ckpt))
    highest = peaks(facts, variant, 6)
    extrapolated = dict.fromkeys(highest, 0)
    for each in of_variant(facts, variant):
        extrapolated[each.name] = max(extrapolated[each.name], each.total)
    assert extrapolated == highest


def test_the_same_question_has_the_same_answer() -> None:
    variant = variant_of(changed(WAY, grad_ckpt=True))
    first = of_variant(model("qwen3_moe"), variant)
    of_variant.cache_clear()
    assert of_variant(model("qwen3_moe"), variant) == first


TOWER = {
    "depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": h,
    "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip


def vision_language_model(**tower: int) -> ModelFacts:
    """Returns a small model that sees."""
    sizes = {**TOWER, **tower}
    config = {"model_type": "qwen3_vl", "text_config": SIZES, "vision_config": sizes, "tie_word_embeddings": False}
    return from_config(config, name="qwen3_vl", source="qwen3_vl")


def test_without_images_a_vision_language_model_costs_what_its_decoder_does() -> None:
    assert profile(vision_language_model(), WAY) == profile(model("qwen3"), WAY)


def test_a_frozen_tower_leaves_nothing_but_features() -> None:
    """Positions stay with the inputs; pixels and what else the tower made are gone when the loss is there."""
    seeing = changed(WAY, image_patches=256)
    before, after = (instant(vision_language_model(), way, "loss backward") for way in (WAY, seeing))
    pixels, positions = 2 * 256 * 3 * 2 * 16 * 16, 3 * 8 * T
    assert after.total - before.total == pytest.approx(positions, abs=8 * T)
    assert instant(vision_language_model(), seeing, "vision forward").total > pixels + 256 * 30 * 256


def test_a_packed_row_is_planned_with_as_many_images_as_fill_it() -> None:
    """A row of T tokens has room for 4 T patches; pixels of all of them, and features in the place of all tokens."""
    packed = changed(WAY, image_patches=256, packing=True)
    alone, full = (
        instant(vision_language_model(), way, "loss forward") for way in (changed(packed, image_patches=0), packed)
    )
    pixels, positions = 2 * (4 * T) * 3 * 2 * 16 * 16, 3 * 8 * T
    assert full.total - alone.total == pytest.approx(pixels + positions, abs=8 * T)


def test_a_block_of_a_trained_tower_keeps_what_the_closed_form_says() -> None:
    """Norms and their statistics, keys, queries and values, queries and keys rotated, output, MLP, two sums."""
    job = Job(model="", output_dir="", freeze_vision_tower=False, freeze_multi_modal_projector=False)
    models = [with_frozen(vision_language_model(depth=depth), job) for depth in (4, 5)]
    fewer, more = (instant(facts, changed(WAY, image_patches=256), "loss backward").total for facts in models)
    assert more - fewer == 256 * (2 * 256 * 10 + 4 * 512 + 4 * 4 + 2 * 8)
    recomputed = changed(WAY, image_patches=256, grad_ckpt=True)
    fewer, more = (instant(facts, recomputed, "loss backward").total for facts in models)
    assert more - fewer == 256 * 2 * 256


def test_every_family_that_facts_know_has_layer_code() -> None:
    from dstrain.facts.model.families import FAMILIES

    assert set(LAYER_CODE) == set(FAMILIES)
    towers = {name: family.traces_images for name, family in FAMILIES.items() if family.vision is not None}
    assert towers == {name: LAYER_CODE[name].tower is None for name in towers}
