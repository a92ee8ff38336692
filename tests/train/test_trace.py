"""The tracer against closed forms, against what PyTorch allocates on a CPU, and in what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Attention, Method, Precision
from dstrain.facts.model.model_facts import Kind
from dstrain.facts.model.tracer import Answer, Failure, Questions, ask, from_description
from dstrain.facts.model.traces import Description, Question, Subject, Trace, Wanted
from dstrain.facts.model.traits import FROZEN
from dstrain.job.model_changes import Lora
from dstrain.records import to_data
from tests.conftest import asked_for
from tests.train import vision_families

pytestmark = pytest.mark.engine

B, S, L, V = 2, 128, 3, 2000
H, INNER, HEADS, KV, D = 256, 384, 8, 2, 32
T, Q, K = B * S, HEADS * D, KV * D
SEED_BYTES = 24
"""Flash attention keeps a random seed of 16 bytes and an offset of 8; its memory-efficient sister 16 in all."""

LLAMA = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": L,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "dtype": "bfloat16",
}
QWEN3 = LLAMA | {"model_type": "qwen3"}
EXPERTS = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
TOWER = {"depth": 3, "hidden_size": 128, "intermediate_size": 320, "num_heads": 4, "out_hidden_size": H}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {**LLAMA, "model_type": "qwen3_vl_text", "head_dim": 128},
    "vision_config": {**TOWER, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1]},
}
LLAVA = {
    "model_type": "llava",
    "text_config": LLAMA,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}
"""Its aligner stands beside the tower."""
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {**LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 6, "vocab_size_per_layer_input": V},
    "vision_config": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 8,
    },
}
"""The heads of its sixth layer are wider than those of the others."""
WHOLE_IMAGES = {"use_bidirectional_attention": "vision"}
"""The tokens of an image see each other, as in the larger models of Gemma 4."""
PATCHES = 64
PLAIN = Question(subject=Subject(config=LLAMA), micro_batch=B, seq_len=S, round_bytes=1)


def of(config: dict[str, Any], **options: Any) -> Question:
    return replace(PLAIN, subject=Subject(config=config), **options)


def tower(depth: int) -> Question:
    config = QWEN3_VL | {"vision_config": {**QWEN3_VL["vision_config"], "depth": depth}}
    return of(config, image_patches=PATCHES, frozen_parts=(), num_hidden_layers=None)


SEEN = {
    "qwen2_5_vl": 64,
    "glm4v": 64,
    "gemma3": 16,
    "internvl": 32,
    "llava_onevision": 48,
    "mistral3": 64,
    "idefics3": 32,
    "smolvlm": 32,
}
"""Family → patches of a sample: grids, one or several crops, a whole image with crops of it, an image of any size."""


def seeing(name: str, **options: Any) -> Question:
    """Returns a question about a tiny model that sees images."""
    family = vision_families.ALL[name]
    ids = {key: index for index, key in enumerate(family.ids)}
    config = vision_families.config_of(name, family, ids, {"vocab_size": V}).to_dict()
    return of(config, image_patches=SEEN[name], seq_len=96, attn=Attention.EAGER, **options)


SIZES: dict[str, dict[str, int | None]] = {
    "qwen2_5_vl": {"spatial_merge_size": 2, "crop_patches": None, "num_full_layers": 1},
    "glm4v": {"spatial_merge_size": 2, "crop_patches": None, "num_full_layers": None},
    "gemma3": {"spatial_merge_size": 2, "crop_patches": 16},
    "internvl": {"spatial_merge_size": 2, "crop_patches": 16},
    "llava_onevision": {"spatial_merge_size": 1, "crop_patches": 16},
    "mistral3": {"spatial_merge_size": 2, "crop_patches": None},
    "idefics3": {"spatial_merge_size": 2, "crop_patches": 16},
    "smolvlm": {"spatial_merge_size": 2, "crop_patches": 16},
}
"""What a tower shows at work."""

QUESTIONS = {
    "llama": PLAIN,
    "again": PLAIN,
    "qwen3": of(QWEN3),
    "flash": of(LLAMA, attn=Attention.FLASH_ATTENTION_2),
    "fp32": of(LLAMA | {"num_key_value_heads": HEADS}, precision=Precision.FP32),
    "experts": of(EXPERTS),
    "experts, fp32": of(EXPERTS, precision=Precision.FP32),
    "padding": of(LLAMA, has_padding=True),
    "packed": of(LLAMA, is_packed=True),
    "flash, padding": of(LLAMA, attn=Attention.FLASH_ATTENTION_2, has_padding=True),
    "recomputed": of(LLAMA, grad_ckpt=True),
    "re-entrant": of(LLAMA, grad_ckpt=True, is_reentrant=True),
    "held": of(LLAMA, holds_outputs=True),
    "rounded": of(LLAMA, round_bytes=512),
    "lora": of(LLAMA, method=Method.LORA, lora=Lora(rank=8)),
    "dropout": of(LLAMA, method=Method.LORA, lora=Lora(rank=8, dropout=0.1)),
    "tied": of(LLAMA | {"tie_word_embeddings": True}),
    "two layers": of(LLAMA, num_hidden_layers=2),
    "tower 3": tower(3),
    "tower 4": tower(4),
    "aligner": of(LLAVA, wanted=Wanted.DESCRIPTION),
    "unknown": of({"model_type": "nobody"}),
    "wrong": of(LLAMA | {"num_attention_heads": 7}),
    "images": of(LLAMA, image_patches=64),
    "odd patches": of(QWEN3_VL, image_patches=7),
    **{f"sizes of {name}": replace(seeing(name), wanted=Wanted.DESCRIPTION) for name in SIZES},
    "gemma 4": of(GEMMA4, wanted=Wanted.DESCRIPTION),
    "odd images of gemma 4": of(GEMMA4, image_patches=64),
    "half a crop": replace(seeing("internvl"), image_patches=8),
    "no such image": replace(seeing("llava_onevision"), image_patches=64),
    "packed, with images": replace(seeing("qwen2_5_vl"), is_packed=True, attn=Attention.SDPA),
    "packed, no positions": replace(seeing("qwen2_5_vl"), image_patches=0, is_packed=True, attn=Attention.SDPA),
    "not packed": replace(seeing("qwen2_5_vl"), image_patches=0, attn=Attention.SDPA),
    "targets": of(LLAMA, method=Method.LORA, lora=Lora(targets=("nothing",))),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return dict(zip(QUESTIONS, ask(list(QUESTIONS.values())), strict=True))


@pytest.fixture
def traces(answers: dict[str, Answer]) -> dict[str, Trace]:
    return {name: answer for name, answer in answers.items() if isinstance(answer, Trace)}


def test_an_aligner_beside_the_tower_is_frozen_as_it_is_in_training(answers: dict[str, Answer]) -> None:
    description = answers["aligner"]
    assert isinstance(description, Description)
    model = from_description(description, name="llava", source="llava")
    of_text = [each for each in description.parameters if each.role != "vision"]
    assert {group.kind for group in model.tensors if "multi_modal_projector" in group.name} == {Kind.VISION}
    assert sum(group.num_trained for group in model.tensors) == sum(math.prod(each.shape) for each in of_text)


def per_token(trace: Trace) -> float:
    """Returns what a layer in the middle keeps of a token, without the seeds of its attention kernel."""
    return trace.saved_bytes[1] / T


def segment(trace: Trace, name: str) -> Any:
    return next(part.highest for part in trace.segments if part.name == name)


LLAMA_FORM = 16 * H + 8 + 4 * Q + 4 * K + 4 * HEADS + 8 * INNER


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", LLAMA_FORM),
        ("flash", LLAMA_FORM),
        ("qwen3", LLAMA_FORM + 6 * (Q + K) + 4 * (HEADS + KV)),
        ("padding", LLAMA_FORM + 4 * (Q - K) + 2 * S),
        ("packed", LLAMA_FORM),
        ("recomputed", 2 * H),
        ("re-entrant", 2 * H),
    ],
)
def test_a_layer_keeps_of_a_token_what_the_closed_form_says(
    traces: dict[str, Trace], name: str, expected: float
) -> None:
    assert per_token(traces[name]) == pytest.approx(expected, abs=2 * SEED_BYTES / T)  # of two rows


def test_fp32_keeps_twice_the_bytes_of_activations_and_no_upcast_copies(traces: dict[str, Trace]) -> None:
    # of a norm: input, normalised and output; of attention: queries, keys, values, output
    form = 4 * (2 * (2 * H) + 2 * H) + 8 + 4 * (2 * Q + 2 * Q) + 4 * HEADS + 4 * 4 * INNER
    assert per_token(traces["fp32"]) == pytest.approx(form, abs=SEED_BYTES / T)


def test_experts_are_traced_in_fp32_too(traces: dict[str, Trace]) -> None:
    assert traces["experts, fp32"].params_bytes == 2 * traces["experts"].params_bytes
    assert 1.5 < per_token(traces["experts, fp32"]) / per_token(traces["experts"]) < 2.5  # the fallback keeps more


def test_dropout_keeps_three_bytes_for_each_input_of_an_adapter(traces: dict[str, Trace]) -> None:
    inputs = 3 * H + Q + 2 * H + INNER
    shared = (
        2 * H + INNER
    )  # without dropout q, k and v keep one input, as do gate and up; that of o is kept by attention
    assert per_token(traces["dropout"]) - per_token(traces["lora"]) == 3 * inputs - 2 * shared


def test_the_loss_holds_twelve_bytes_for_each_logit(traces: dict[str, Trace]) -> None:
    assert segment(traces["llama"], "loss backward").logits == pytest.approx(12 * V * T, abs=64)
    assert segment(traces["llama"], "loss forward").logits == pytest.approx(2 * V * T, abs=64)


def test_held_outputs_hold_two_bytes_more_for_each_logit(traces: dict[str, Trace]) -> None:
    assert traces["held"].peak_bytes - traces["llama"].peak_bytes == 2 * V * T


def test_gradients_of_parameters_are_counted_apart(traces: dict[str, Trace]) -> None:
    trace = traces["llama"]
    assert segment(trace, "embedding backward").grads == trace.trainable_bytes == trace.params_bytes
    adapters = 8 * (2 * (H + Q) + 2 * (H + K) + 3 * (H + INNER)) * L
    assert traces["lora"].trainable_bytes == 2 * adapters


def test_gradients_of_a_tied_head_are_counted_while_they_are_two(traces: dict[str, Trace]) -> None:
    weight = 2 * V * H
    trace = traces["tied"]
    assert segment(trace, "head backward").grads == weight
    assert segment(trace, "embedding backward").grads == trace.trainable_bytes + 2 * weight


def test_storages_are_rounded_up(traces: dict[str, Trace]) -> None:
    assert traces["rounded"].peak_bytes % 512 == 0
    assert 1 < traces["rounded"].peak_bytes / traces["llama"].peak_bytes < 1.01


def test_an_answer_does_not_depend_on_what_was_asked_before(answers: dict[str, Answer]) -> None:
    assert answers["llama"] == answers["again"]


def test_a_model_is_shortened_to_its_first_layers(traces: dict[str, Trace]) -> None:
    assert len(traces["llama"].saved_bytes) == L - 1
    assert traces["two layers"].saved_bytes == traces["llama"].saved_bytes[:1]


def test_a_trained_tower_keeps_of_a_patch_what_the_closed_form_says(traces: dict[str, Trace]) -> None:
    width, inner, heads = TOWER["hidden_size"], TOWER["intermediate_size"], TOWER["num_heads"]
    assert isinstance(width, int) and isinstance(inner, int) and isinstance(heads, int)
    grown = (segment(traces[name], "loss backward").activations for name in ("tower 4", "tower 3"))
    more, less = grown
    seeds = B * SEED_BYTES / (B * PATCHES)
    assert (more - less) / (B * PATCHES) == pytest.approx(22 * width + 4 * inner + 4 * heads + 16, abs=seeds)


def test_a_width_that_differs_by_layer_is_that_of_most(answers: dict[str, Answer]) -> None:
    description = answers["gemma 4"]
    assert isinstance(description, Description)
    assert description.sizes["head_dim"] == D
    assert description.layer_kinds == (0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize("name", SIZES)
def test_a_tower_shows_its_crops_and_the_patches_of_a_token(answers: dict[str, Answer], name: str) -> None:
    description = answers[f"sizes of {name}"]
    assert isinstance(description, Description)
    vision = from_description(description, name=name, source=name).vision
    assert vision is not None
    assert {field: getattr(vision, field) for field in SIZES[name]} == SIZES[name]


def test_packed_rows_of_a_family_whose_attention_gets_no_positions_have_masks(traces: dict[str, Trace]) -> None:
    packed, other = traces["packed, no positions"], traces["not packed"]
    of_mask = B * 96 * 96
    of_heads = 2 * B * 96 * (64 - 32)  # a kernel with a mask takes keys and values of all heads
    kept = packed.saved_bytes[0] - other.saved_bytes[0]
    assert kept == pytest.approx(2 * of_mask + 2 * of_heads, abs=SEED_BYTES)
    assert packed.inputs_bytes - other.inputs_bytes > of_mask
    assert traces["packed, with images"].inputs_bytes > packed.inputs_bytes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unknown", 'no code for model_type "nobody"'),
        ("wrong", "Transformers cannot read the config"),
        ("images", "images of llama cannot be traced"),
        ("odd patches", "7 image patches are not a multiple of the 4"),
        ("odd images of gemma 4", "64 image patches are not a multiple of the 9"),
        ("half a crop", "images of internvl are not 8 patches"),
        ("no such image", "images of llava_onevision are not 64 patches"),
        ("targets", 'lora: targets is "nothing"'),
    ],
)
def test_what_cannot_be_traced_is_said(answers: dict[str, Answer], name: str, says: str) -> None:
    failure = answers[name]
    assert isinstance(failure, Failure)
    assert says in failure.problem


RNG_STATE_BYTES = 5056 + 64
"""What a checkpointed layer keeps on a CPU: the state of its random numbers."""

MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": HEADS,
    "head_dim": 16,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
ON_A_CPU = {
    f"{config['model_type']}, {method.value}, {'recomputed' if grad_ckpt else 'kept'}": of(
        config,
        method=method,
        grad_ckpt=grad_ckpt,
        micro_batch=1,
        seq_len=96,
        attn=Attention.EAGER,  # the one that CPUs and GPUs have alike
        lora=Lora(rank=8, targets=("o_proj",)),
    )
    for config in (
        LLAMA,
        LLAMA | {"tie_word_embeddings": True, "model_type": "granite"},
        LLAMA | {"model_type": "gemma3_text", "sliding_window": 64},
        MOE,
        LLAMA | LATENT | {"model_type": "deepseek_v2"},
    )
    for method in (Method.FULL, Method.LORA)
    for grad_ckpt in (False, True)
}
ON_A_CPU |= {
    f"{name}, {what}, {'recomputed' if grad_ckpt else 'kept'}": seeing(name, frozen_parts=parts, grad_ckpt=grad_ckpt)
    for name in SEEN
    for what, parts in (("frozen", tuple(sorted(FROZEN))), ("trained", ()))
    for grad_ckpt in (False, True)
}
ON_A_CPU |= {
    f"gemma4, {what}": of(config, image_patches=36, seq_len=96, attn=Attention.EAGER, frozen_parts=parts)
    for what, config, parts in (
        ("frozen", GEMMA4, tuple(sorted(FROZEN))),
        ("trained, images seen whole", {**GEMMA4, "text_config": {**GEMMA4["text_config"], **WHOLE_IMAGES}}, ()),
    )
}


@pytest.fixture(scope="module")
def on_a_cpu(request: pytest.FixtureRequest) -> dict[str, tuple[int, int]]:
    """Returns what was traced and what was allocated."""
    names = [name for name in asked_for(request, "name") if name in ON_A_CPU]
    asked = tuple(ON_A_CPU[name] for name in names)
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.allocating"],
        input=json.dumps(to_data(Questions(questions=asked))),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    traced = [answer.peak_bytes if isinstance(answer, Trace) else 0 for answer in ask(asked)]
    return dict(zip(names, zip(traced, json.loads(done.stdout), strict=True), strict=True))


@pytest.mark.parts(12)
@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_trace_equals_what_pytorch_allocates(on_a_cpu: dict[str, tuple[int, int]], name: str) -> None:
    traced, allocated = on_a_cpu[name]
    layers = 4 if ON_A_CPU[name].image_patches else L  # two of them in the tower
    unseen = 512 + (RNG_STATE_BYTES * layers if ON_A_CPU[name].grad_ckpt else 0)
    fewer = 0 if ON_A_CPU[name].frozen_parts else 1e-3 * traced  # a CPU sums gradients of biases up in place
    assert -fewer <= allocated - traced <= unseen
