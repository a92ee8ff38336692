"""The parameter tensors of each decoder family, as Transformers 5.23 builds them for causal language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dstrain.facts.model.config_fields import Fields
from dstrain.facts.model.model_facts import Kind, TensorGroup
from dstrain.facts.model.vision_towers import qwen3_vl_tower, siglip_tower

Groups = list[TensorGroup]

_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA3_NORMS = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM4_NORMS = (*_PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


class Inventory(Protocol):
    """The signature of a family's function: its config in, every parameter tensor out."""

    def __call__(self, config: Fields) -> Groups:
        """Returns every parameter tensor; tied ones once."""


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
    return decoder(config, [*_normed_attention(config), *mlp(config)])


def gemma3_text(config: Fields) -> Groups:
    """Returns the tensors of Gemma 3 without its vision tower: four norms a layer."""
    return decoder(config, [*_normed_attention(config), *mlp(config)], norms=_GEMMA3_NORMS)


def glm(config: Fields) -> Groups:
    """Returns the tensors of GLM-4-9B: gate and up projection are one matrix."""
    return decoder(config, _glm_layers(config))


def glm4(config: Fields) -> Groups:
    """Returns the tensors of GLM-4-0414: GLM with four norms a layer."""
    return decoder(config, _glm_layers(config), norms=_GLM4_NORMS)


def phi3(config: Fields) -> Groups:
    """Returns the tensors of Phi 3 and Phi 4: queries, keys and values are one matrix, gate and up another."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    queries, keys = attention_widths(config)
    fused = [
        *_linear("self_attn.qkv_proj", Kind.ATTENTION, (queries + 2 * keys, hidden), layers),
        *_linear("self_attn.o_proj", Kind.ATTENTION, (hidden, queries), layers),
    ]
    return decoder(config, [*fused, *_fused_mlp(config)])


def mixtral(config: Fields) -> Groups:
    """Returns the tensors of Mixtral: experts in every layer, as wide as `intermediate_size`."""
    layers, width = config.size("num_hidden_layers"), config.size("intermediate_size")
    return decoder(config, [*attention(config), *_experts(config, layers, width)])


def qwen2_moe(config: Fields) -> Groups:
    """Returns the tensors of Qwen 2 MoE: a gated shared expert beside the routed ones."""
    layers, hidden = _num_sparse_layers(config), config.size("hidden_size")
    shared = [
        *mlp(config, part="mlp.shared_expert", count=layers, width=config.size("shared_expert_intermediate_size")),
        *_linear("mlp.shared_expert_gate", Kind.ROUTER, (1, hidden), layers),
    ]
    return decoder(config, [*attention(config, qkv_bias=config.flag("qkv_bias")), *_sparse_mlp(config), *shared])


def qwen3_moe(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 MoE: no shared expert."""
    return decoder(config, [*_normed_attention(config), *_sparse_mlp(config)])


def deepseek_v2(config: Fields) -> Groups:
    """Returns the tensors of DeepSeek V2: latent attention, shared experts, the first layers dense."""
    return decoder(config, [*latent_attention(config), *_deepseek_mlp(config, bias=config.flag("mlp_bias"))])


def deepseek_v3(config: Fields) -> Groups:
    """Returns the tensors of DeepSeek V3, whose multi-token-prediction layer Transformers does not build.

    The router's `e_score_correction_bias` is not among them either: it is a buffer, updated without gradients.
    """
    return decoder(config, [*latent_attention(config), *_deepseek_mlp(config, bias=False)])


def gemma3(config: Fields) -> Groups:
    """Returns the tensors of Gemma 3 with its SigLIP tower."""
    text = config.section("text_config")
    layers = [*_normed_attention(text), *mlp(text)]
    return [*siglip_tower(config), *decoder(text, layers, norms=_GEMMA3_NORMS, whole=config)]


def qwen3_vl(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 VL: Qwen 3 and its tower."""
    text = config.section("text_config")
    return [*qwen3_vl_tower(config), *decoder(text, [*_normed_attention(text), *mlp(text)], whole=config)]


def qwen3_vl_moe(config: Fields) -> Groups:
    """Returns the tensors of Qwen 3 VL MoE: Qwen 3 MoE and the tower of Qwen 3 VL."""
    text = config.section("text_config")
    return [*qwen3_vl_tower(config), *decoder(text, [*_normed_attention(text), *_sparse_mlp(text)], whole=config)]


def decoder(
    config: Fields, layers: Groups, *, norms: Sequence[str] = _PRE_NORMS, whole: Fields | None = None
) -> Groups:
    """Returns the layers with their norms, the embedding, the last norm and, unless tied, the head.

    `whole` is the config of the vision-language model around this decoder: there Transformers asks the outer config
    whether the head is tied, and puts the decoder one level deeper.
    """
    hidden, vocab, depth = config.size("hidden_size"), config.size("vocab_size"), config.size("num_hidden_layers")
    root = "model" if whole is None else "model.language_model"
    head = _linear("lm_head", Kind.HEAD, (vocab, hidden), 1)
    groups = [
        _tensor(f"{root}.embed_tokens.weight", Kind.EMBEDDING, (vocab, hidden), 1),
        *layers,
        *(_tensor(f"{norm}.weight", Kind.NORM, (hidden,), depth) for norm in norms),
        _tensor(f"{root}.norm.weight", Kind.NORM, (hidden,), 1),
        *([] if (whole or config).flag("tie_word_embeddings") else head),
    ]
    return [group for group in groups if group.count]


def head_dim(config: Fields) -> int:
    """Returns the width of one head: given, or the hidden size shared among the heads."""
    return config.optional_size("head_dim") or config.divided("hidden_size", "num_attention_heads")


def num_key_value_heads(config: Fields) -> int:
    """Returns the heads of keys and values: given, or as many as of queries, which they divide."""
    heads = config.optional_size("num_key_value_heads")
    if heads is None:
        return config.size("num_attention_heads")
    config.divided("num_attention_heads", "num_key_value_heads")
    return heads


def attention_widths(config: Fields) -> tuple[int, int]:
    """Returns the summed width of the query heads, and of the key heads, which equals the values'."""
    width = head_dim(config)
    return config.size("num_attention_heads") * width, num_key_value_heads(config) * width


def attention(config: Fields, *, qkv_bias: bool = False, out_bias: bool = False) -> Groups:
    """Returns the four projections of multi-head or grouped-query attention."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    queries, keys = attention_widths(config)
    return [
        *_linear("self_attn.q_proj", Kind.ATTENTION, (queries, hidden), layers, bias=qkv_bias),
        *_linear("self_attn.k_proj", Kind.ATTENTION, (keys, hidden), layers, bias=qkv_bias),
        *_linear("self_attn.v_proj", Kind.ATTENTION, (keys, hidden), layers, bias=qkv_bias),
        *_linear("self_attn.o_proj", Kind.ATTENTION, (hidden, queries), layers, bias=out_bias),
    ]


def latent_attention(config: Fields) -> Groups:
    """Returns the projections of multi-head latent attention; queries go through a latent only if it has a rank."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, rank = config.size("num_attention_heads"), config.size("kv_lora_rank")
    q_rank = config.optional_size("q_lora_rank")
    rope, nope, v_width = (config.size(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    has_bias, queries = config.flag("attention_bias"), heads * (rope + nope)
    through_latent = [
        *_linear("self_attn.q_a_proj", Kind.ATTENTION, (q_rank or 0, hidden), layers, bias=has_bias),
        _tensor("self_attn.q_a_layernorm.weight", Kind.NORM, (q_rank or 0,), layers),
        *_linear("self_attn.q_b_proj", Kind.ATTENTION, (queries, q_rank or 0), layers),
    ]
    direct = _linear("self_attn.q_proj", Kind.ATTENTION, (queries, hidden), layers)
    return [
        *(through_latent if q_rank else direct),
        *_linear("self_attn.kv_a_proj_with_mqa", Kind.ATTENTION, (rank + rope, hidden), layers, bias=has_bias),
        _tensor("self_attn.kv_a_layernorm.weight", Kind.NORM, (rank,), layers),
        *_linear("self_attn.kv_b_proj", Kind.ATTENTION, (heads * (nope + v_width), rank), layers),
        *_linear("self_attn.o_proj", Kind.ATTENTION, (hidden, heads * v_width), layers, bias=has_bias),
    ]


def mlp(
    config: Fields, *, part: str = "mlp", count: int | None = None, width: int | None = None, bias: bool = False
) -> Groups:
    """Returns the three matrices of a gated MLP; by default of every layer."""
    hidden, inner = config.size("hidden_size"), width or config.size("intermediate_size")
    layers = config.size("num_hidden_layers") if count is None else count
    return [
        *_linear(f"{part}.gate_proj", Kind.MLP, (inner, hidden), layers, bias=bias),
        *_linear(f"{part}.up_proj", Kind.MLP, (inner, hidden), layers, bias=bias),
        *_linear(f"{part}.down_proj", Kind.MLP, (hidden, inner), layers, bias=bias),
    ]


def _normed_attention(config: Fields) -> Groups:
    has_bias, width, layers = config.flag("attention_bias"), head_dim(config), config.size("num_hidden_layers")
    return [
        *attention(config, qkv_bias=has_bias, out_bias=has_bias),
        _tensor("self_attn.q_norm.weight", Kind.NORM, (width,), layers),
        _tensor("self_attn.k_norm.weight", Kind.NORM, (width,), layers),
    ]


def _fused_mlp(config: Fields) -> Groups:
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    layers = config.size("num_hidden_layers")
    return [
        *_linear("mlp.gate_up_proj", Kind.MLP, (2 * inner, hidden), layers),
        *_linear("mlp.down_proj", Kind.MLP, (hidden, inner), layers),
    ]


def _glm_layers(config: Fields) -> Groups:
    return [*attention(config, qkv_bias=config.flag("attention_bias")), *_fused_mlp(config)]


def _experts(config: Fields, count: int, width: int) -> Groups:
    hidden, experts = config.size("hidden_size"), config.size("num_experts")
    return [
        _tensor("mlp.gate.weight", Kind.ROUTER, (experts, hidden), count),
        _tensor("mlp.experts.gate_up_proj", Kind.EXPERT, (experts, 2 * width, hidden), count),
        _tensor("mlp.experts.down_proj", Kind.EXPERT, (experts, hidden, width), count),
    ]


def _num_sparse_layers(config: Fields) -> int:
    """Returns the layers with experts: each `decoder_sparse_step`-th, but for those listed as dense."""
    step, layers = config.size("decoder_sparse_step"), config.size("num_hidden_layers")
    dense = {index for index in config.indices("mlp_only_layers") if 0 <= index < layers and (index + 1) % step == 0}
    return layers // step - len(dense)


def _sparse_mlp(config: Fields) -> Groups:
    sparse = _num_sparse_layers(config)
    return [
        *mlp(config, count=config.size("num_hidden_layers") - sparse),
        *_experts(config, sparse, config.size("moe_intermediate_size")),
    ]


def _deepseek_mlp(config: Fields, *, bias: bool) -> Groups:
    layers, width = config.size("num_hidden_layers"), config.size("moe_intermediate_size")
    dense = min(config.count("first_k_dense_replace"), layers)
    shared = config.size("n_shared_experts") * width
    return [
        *mlp(config, count=dense, bias=bias),
        *_experts(config, layers - dense, width),
        *mlp(config, part="mlp.shared_experts", count=layers - dense, width=shared, bias=bias),
    ]


def _tensor(name: str, kind: Kind, shape: tuple[int, ...], count: int) -> TensorGroup:
    return TensorGroup(name=name, kind=kind, shape=shape, count=count, is_linear=False)


def _linear(name: str, kind: Kind, shape: tuple[int, int], count: int, *, bias: bool = False) -> Groups:
    weight = TensorGroup(name=f"{name}.weight", kind=kind, shape=shape, count=count, is_linear=True)
    return [weight, _tensor(f"{name}.bias", kind, shape[:1], count)] if bias else [weight]
