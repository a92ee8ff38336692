"""Derives the facts of a model from its config.json: one row per model family of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dstrain.errors import InvalidConfig, did_you_mean
from dstrain.facts.model import aliases, config_fields
from dstrain.facts.model.config_fields import (
    Fields,
    WindowRule,
    but_every_sixth,
    every_second_lower_layer,
    upper_layers,
    windows,
)
from dstrain.facts.model.model_facts import Kind, ModelFacts, Moe, TensorGroup, Vision
from dstrain.facts.model.parameter_tensors import (
    PRE_NORMS,
    Groups,
    attention,
    attention_widths,
    decoder,
    deepseek_mlp,
    experts,
    fused_mlp,
    glm_layers,
    head_dim,
    latent_attention,
    linear,
    mlp,
    normed_attention,
    num_key_value_heads,
    num_sparse_layers,
    sparse_mlp,
)
from dstrain.facts.model.traits import PLAIN, FusedParts
from dstrain.facts.model.vision_towers import qwen3_vl_tower, qwen3_vl_vision, siglip_tower, siglip_vision

_DTYPES = ("bfloat16", "float16", "float32")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Transformers."""

    tensors: Callable[[Fields], Groups]
    """Returns every parameter tensor; tied ones once."""
    defaults: Mapping[str, object]
    """Values of Transformers 5.23's config class for keys that config.json lacks; false and None are left out."""
    moe_block: str | None = None
    """Class name of its MoE block, in Transformers' `models/<model_type>/modeling_<model_type>.py`."""
    vision: Callable[[Fields], Vision] | None = None
    """Returns the facts of the vision tower; the decoder is then under `text_config`."""
    traces_images: bool = False
    """Whether training on images is traced, as the planner does not know the code of the tower."""
    windows: WindowRule | None = None
    """Which layers use sliding-window attention."""
    liger: FusedParts | None = None
    """Parts that Liger replaces by default, as ranks do, except for the loss; None: jobs with it are refused.
    Source: liger-kernel 0.8.5 transformers/monkey_patch.py: apply_liger_kernel_to_…. It has kernels for Qwen3-VL too,
    and cannot load them: transformers/model/output_classes.py asks for a class that Transformers 5.23 does not have."""
    shares_experts: bool = False
    """Whether ranks may share its experts, which was tried."""

    @property
    def layers_root(self) -> str:
        """The name of the list of decoder layers."""
        return "model.language_model.layers" if self.vision else "model.layers"


_GEMMA3_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM4_NORMS = (*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


def llama(config: Fields) -> Groups:
    """Returns the tensors of Llama, and of families with the same tensors and other arithmetic."""
    has_bias = config.flag("attention_bias")
    layers = [*attention(config, qkv_bias=has_bias, out_bias=has_bias), *mlp(config, bias=config.flag("mlp_bias"))]
    return decoder(config, layers)


def mistral(config: Fields) -> Groups:
    """Returns the tensors of Mistral: no biases."""
    return decoder(config, [*attention(config), *mlp(config)])


def qwen2(config: Fields) -> Groups:
    """Returns the tensors of Qwen 2 and 2.5: biases on queries, keys and values."""
    return decoder(config, [*attention(config, qkv_bias=True), *mlp(config)])


def qwen3(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3: queries and keys are normalised."""
    return decoder(config, [*normed_attention(config), *mlp(config)])


def gemma3_text(config: Fields) -> Groups:
    """Returns the tensors of Gemma 3 without its vision tower: four norms a layer."""
    return decoder(config, [*normed_attention(config), *mlp(config)], norms=_GEMMA3_NORMS)


def glm(config: Fields) -> Groups:
    """Returns the tensors of GLM-4-9B: gate and up projection are one matrix."""
    return decoder(config, glm_layers(config))


def glm4(config: Fields) -> Groups:
    """Returns the tensors of GLM-4-0414: GLM with four norms a layer."""
    return decoder(config, glm_layers(config), norms=_GLM4_NORMS)


def phi3(config: Fields) -> Groups:
    """Returns the tensors of Phi 3 and Phi 4: queries, keys and values are one matrix, gate and up another."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    queries, keys = attention_widths(config)
    fused = [
        *linear("self_attn.qkv_proj", Kind.ATTENTION, (queries + 2 * keys, hidden), layers),
        *linear("self_attn.o_proj", Kind.ATTENTION, (hidden, queries), layers),
    ]
    return decoder(config, [*fused, *fused_mlp(config)])


def mixtral(config: Fields) -> Groups:
    """Returns the tensors of Mixtral: experts in every layer, as wide as `intermediate_size`."""
    layers, width = config.size("num_hidden_layers"), config.size("intermediate_size")
    return decoder(config, [*attention(config), *experts(config, layers, width)])


def qwen2_moe(config: Fields) -> Groups:
    """Returns the tensors of Qwen 2 MoE: a gated shared expert beside the routed ones."""
    layers, hidden = num_sparse_layers(config), config.size("hidden_size")
    shared = [
        *mlp(config, part="mlp.shared_expert", count=layers, width=config.size("shared_expert_intermediate_size")),
        *linear("mlp.shared_expert_gate", Kind.ROUTER, (1, hidden), layers),
    ]
    return decoder(config, [*attention(config, qkv_bias=config.flag("qkv_bias")), *sparse_mlp(config), *shared])


def qwen3_moe(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 MoE: no shared expert."""
    return decoder(config, [*normed_attention(config), *sparse_mlp(config)])


def deepseek_v2(config: Fields) -> Groups:
    """Returns the tensors of DeepSeek V2: latent attention, shared experts, the first layers dense."""
    return decoder(config, [*latent_attention(config), *deepseek_mlp(config, bias=config.flag("mlp_bias"))])


def deepseek_v3(config: Fields) -> Groups:
    """Returns the tensors of DeepSeek V3, whose multi-token-prediction layer Transformers does not build.

    The router's `e_score_correction_bias` is not among them either: it is a buffer, updated without gradients.
    """
    return decoder(config, [*latent_attention(config), *deepseek_mlp(config, bias=False)])


def gemma3(config: Fields) -> Groups:
    """Returns the tensors of Gemma 3 with its SigLIP tower."""
    text = config.section("text_config")
    layers = [*normed_attention(text), *mlp(text)]
    return [*siglip_tower(config), *decoder(text, layers, norms=_GEMMA3_NORMS, whole=config)]


def qwen3_vl(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 VL: Qwen 3 and its tower."""
    text = config.section("text_config")
    return [*qwen3_vl_tower(config), *decoder(text, [*normed_attention(text), *mlp(text)], whole=config)]


def qwen3_vl_moe(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 VL MoE: Qwen 3 MoE and the tower of Qwen 3 VL."""
    text = config.section("text_config")
    return [*qwen3_vl_tower(config), *decoder(text, [*normed_attention(text), *sparse_mlp(text)], whole=config)]


_GEMMA3_TEXT = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 16, "vision_use_head": True,
}  # fmt: skip
_GEMMA3 = {
    "text_config": _GEMMA3_TEXT, "vision_config": _SIGLIP, "mm_tokens_per_image": 256, "tie_word_embeddings": True,
}  # fmt: skip
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_MIXTRAL = {**_MISTRAL, "num_experts": 8, "num_experts_per_tok": 2}
_QWEN2_MOE = {
    "num_key_value_heads": 16, "max_position_embeddings": 32768, "qkv_bias": True, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
}  # fmt: skip
_QWEN3_MOE = {
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_V2 = {
    **_LATENT, "max_position_embeddings": 2048, "num_experts": 64, "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_LATENT, "max_position_embeddings": 4096, "num_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
}  # fmt: skip
_QWEN3_VL_TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}  # fmt: skip
_QWEN3_VL = {
    "text_config": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000},
    "vision_config": _QWEN3_VL_TOWER,
}
_QWEN3_VL_MOE = {
    "text_config": {
        "num_key_value_heads": 16, "max_position_embeddings": 128000, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
    },
    "vision_config": _QWEN3_VL_TOWER,
}  # fmt: skip
_QWEN2 = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_SMOLLM3 = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True}
_LLAMA = {"max_position_embeddings": 2048}

_GEMMA3_WINDOWS = WindowRule(count=but_every_sixth)
_QWEN_WINDOWS = WindowRule(count=upper_layers, is_switched=True)
_OPTIONAL_WINDOW = WindowRule(default=None, reads_layer_types=False)

_FUSED = FusedParts()
_FUSED_EXPERTS = FusedParts(experts=True)
_FUSED_LATENT = FusedParts(rotary=False, experts=True)
_FUSED_GEMMA = FusedParts(norm_in_place=False)

# fmt: off
FAMILIES: Mapping[str, Family] = MappingProxyType({
    "deepseek_v2": Family(tensors=deepseek_v2, defaults=_DEEPSEEK_V2, moe_block="DeepseekV2Moe", liger=_FUSED_LATENT),
    "deepseek_v3": Family(tensors=deepseek_v3, defaults=_DEEPSEEK_V3, moe_block="DeepseekV3MoE", liger=_FUSED_LATENT,
        shares_experts=True),
    "gemma3": Family(tensors=gemma3, defaults=_GEMMA3, vision=siglip_vision, traces_images=True,
        windows=_GEMMA3_WINDOWS, liger=_FUSED_GEMMA),
    "gemma3_text": Family(tensors=gemma3_text, defaults=_GEMMA3_TEXT, windows=_GEMMA3_WINDOWS, liger=_FUSED_GEMMA),
    "glm": Family(tensors=glm, defaults=_GLM),
    "glm4": Family(tensors=glm4, defaults=_GLM, liger=FusedParts(norm_in_place=False, rotary=False)),
    "granite": Family(tensors=llama, defaults=_LLAMA, liger=_FUSED),
    "llama": Family(tensors=llama, defaults=_LLAMA, liger=_FUSED),
    "ministral": Family(tensors=mistral, defaults=_MISTRAL, windows=WindowRule(), liger=_FUSED),
    "mistral": Family(tensors=mistral, defaults=_MISTRAL, windows=WindowRule(reads_layer_types=False), liger=_FUSED),
    "mixtral": Family(tensors=mixtral, defaults=_MIXTRAL, moe_block="MixtralSparseMoeBlock", windows=_OPTIONAL_WINDOW,
        liger=_FUSED_EXPERTS, shares_experts=True),
    "phi3": Family(tensors=phi3, defaults={"max_position_embeddings": 4096}, windows=_OPTIONAL_WINDOW, liger=_FUSED),
    "qwen2": Family(tensors=qwen2, defaults=_QWEN2, windows=_QWEN_WINDOWS, liger=_FUSED),
    "qwen2_moe": Family(tensors=qwen2_moe, defaults=_QWEN2_MOE, moe_block="Qwen2MoeSparseMoeBlock",
        windows=WindowRule(count=every_second_lower_layer, is_switched=True)),
    "qwen3": Family(tensors=qwen3, defaults={**_QWEN2, "head_dim": 128}, windows=_QWEN_WINDOWS, liger=_FUSED),
    "qwen3_moe": Family(tensors=qwen3_moe, defaults=_QWEN3_MOE, moe_block="Qwen3MoeSparseMoeBlock",
        windows=WindowRule(reads_layer_types=False, is_switched=True), liger=_FUSED_EXPERTS, shares_experts=True),
    "qwen3_vl": Family(tensors=qwen3_vl, defaults=_QWEN3_VL, vision=qwen3_vl_vision),
    "qwen3_vl_moe": Family(tensors=qwen3_vl_moe, defaults=_QWEN3_VL_MOE, moe_block="Qwen3VLMoeTextSparseMoeBlock",
        vision=qwen3_vl_vision, shares_experts=True),
    "smollm3": Family(tensors=llama, defaults=_SMOLLM3, liger=_FUSED,
        windows=WindowRule(default=None, count=lambda text: 0, is_switched=True)),
})
# fmt: on
"""The supported families, by `model_type`. To add one: a function with its tensors, and a row."""
LIGER: Mapping[str, FusedParts] = MappingProxyType({name: row.liger for name, row in FAMILIES.items() if row.liger})
"""Family → parts that Liger replaces.

>>> "qwen2_moe" in LIGER, "glm" in LIGER
(False, False)
"""
SHARED_EXPERTS = tuple(name for name, row in FAMILIES.items() if row.shares_experts)
"""Families whose experts ranks may share."""


def fused_parts(model_type: str, *, liger: bool, otherwise: FusedParts) -> FusedParts:
    """Returns the parts of a family that run on fused kernels, with or without Liger."""
    return LIGER.get(model_type, PLAIN) if liger else otherwise


def known() -> list[str]:
    """Returns the aliases of shipped models whose families have a row here; layers of the others are traced."""
    found = {alias: aliases.resolve(alias) for alias in aliases.known()}
    return [alias for alias, row in found.items() if row and row[1].config.get("model_type") in FAMILIES]


def from_config(config: Mapping[str, object], *, name: str, source: str) -> ModelFacts:
    """Returns the facts of the model that Transformers 5.23 builds from a config.json, of Transformers 4 or 5.

    Built by AutoModelForCausalLM, or for a vision-language model by AutoModelForImageTextToText; the counts are exact.
    Raises InvalidConfig, with the key, for an unknown family and for missing or impossible values.

    >>> qwen3_8b = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    ...             "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
    >>> from_config(qwen3_8b, name="qwen3-8b", source="Qwen/Qwen3-8B").num_params
    8190735360
    """
    family = _family(config, name)
    whole = Fields(name=name, values=config, defaults=family.defaults)
    text = whole.section("text_config") if family.vision else whole
    text.require(*_SIZES, "max_position_embeddings")
    sizes: dict[str, Any] = {key: text.size(key) for key in _SIZES}
    # heads, widths and norms are taken from the tensors, so that the two cannot disagree
    tensors = tuple(family.tensors(whole))
    key_value_heads, key_width, value_width = _heads(text, tensors)
    sliding_window, num_windowed_layers = windows(text, family.windows)
    return ModelFacts(
        name=name,
        source=source,
        model_type=str(config["model_type"]),
        **sizes,
        num_key_value_heads=key_value_heads,
        head_dim=key_width,
        v_head_dim=value_width,
        rotary_dim=_rotary_dim(text, key_width),
        max_position_embeddings=config_fields.positions(text),
        sliding_window=sliding_window,
        num_windowed_layers=num_windowed_layers,
        tie_word_embeddings=whole.flag("tie_word_embeddings"),
        has_qk_norm=_first(tensors, "self_attn.q_norm.weight") is not None,
        dtype=_dtype(whole, text),
        moe=_moe(text, family, tensors),
        vision=family.vision(whole) if family.vision else None,
        tensors=tensors,
        layers_root=family.layers_root,
        rope_type=config_fields.rope_type(text),
    )


def _family(config: Mapping[str, object], name: str) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        problem = "is missing" if model_type is None else f"is {model_type!r}, not a string"
        raise InvalidConfig(f'{name}: "model_type" {problem}', hint="Give the config.json of a Transformers model.")
    if model_type not in FAMILIES:
        raise InvalidConfig(
            f'{name}: model_type "{model_type}" is not known; known: {", ".join(FAMILIES)}',
            hint=did_you_mean(model_type, list(FAMILIES)),
        )
    return FAMILIES[model_type]


def _heads(text: Fields, tensors: tuple[TensorGroup, ...]) -> tuple[int, int, int]:
    """Returns the number of key-value heads, and the widths of a query or key head and of a value head."""
    if _first(tensors, "self_attn.kv_b_proj.weight") is None:
        width = head_dim(text)
        return num_key_value_heads(text), width, width
    # latent attention expands its latent to as many heads as there are of queries, whatever the config says
    width = text.size("qk_nope_head_dim") + text.size("qk_rope_head_dim")
    return text.size("num_attention_heads"), width, text.size("v_head_dim")


def _rotary_dim(text: Fields, head_width: int) -> int:
    """Returns the number of rotated elements of a head: Transformers 5 writes the share into `rope_parameters`."""
    if text.values.get("qk_rope_head_dim") is not None:
        return text.size("qk_rope_head_dim")
    rope = text.values.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    if share is None:
        share = text.values.get("partial_rotary_factor", text.defaults.get("partial_rotary_factor", 1.0))
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise text.problem("partial_rotary_factor", f"is {share!r}, not a share between 0 and 1")
    return int(head_width * share)


def _moe(text: Fields, family: Family, tensors: tuple[TensorGroup, ...]) -> Moe | None:
    """Returns the experts as the tensors have them, so that the two cannot disagree."""
    gate_up = _first(tensors, "mlp.experts.gate_up_proj")
    if gate_up is None or family.moe_block is None:
        return None
    num_experts, twice_the_width, _ = gate_up.shape
    shared = _first(tensors, "mlp.shared_experts.up_proj.weight", "mlp.shared_expert.up_proj.weight")
    per_token = text.size("num_experts_per_tok")
    if per_token > num_experts:
        raise text.problem("num_experts_per_tok", f"is {per_token}, more than the {num_experts} experts")
    return Moe(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=twice_the_width // 2,
        shared_intermediate_size=shared.shape[0] if shared else 0,
        num_moe_layers=gate_up.count,
        block_class=family.moe_block,
        asks_for_router_loss=text.flag("output_router_logits"),
    )


def _dtype(whole: Fields, text: Fields) -> str:
    """Returns the dtype of the weights; float32 if the config names none, as for a checkpoint older than the field."""
    dtype = (whole.text("dtype") or text.text("dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise whole.problem("dtype", f'is "{dtype}"; known: {", ".join(_DTYPES)}')
    return dtype


def _first(tensors: tuple[TensorGroup, ...], *names: str) -> TensorGroup | None:
    return next((group for group in tensors if group.name in names and group.kind is not Kind.VISION), None)
