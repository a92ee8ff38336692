"""The parameter tensors of the parts of decoders, as Transformers 5.23 builds them for causal language models."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.facts.model.config_fields import Fields
from dstrain.facts.model.model_facts import Kind, TensorGroup

Groups = list[TensorGroup]

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


def decoder(config: Fields, layers: Groups, *, norms: Sequence[str] = PRE_NORMS, whole: Fields | None = None) -> Groups:
    """Returns the layers with their norms, the embedding, the last norm and, unless tied, the head.

    `whole` is the config of the vision-language model around this decoder: there Transformers asks the outer config
    whether the head is tied, and puts the decoder one level deeper.
    """
    hidden, vocab, depth = config.size("hidden_size"), config.size("vocab_size"), config.size("num_hidden_layers")
    root = "model" if whole is None else "model.language_model"
    head = linear("lm_head", Kind.HEAD, (vocab, hidden), 1)
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
        *linear("self_attn.q_proj", Kind.ATTENTION, (queries, hidden), layers, bias=qkv_bias),
        *linear("self_attn.k_proj", Kind.ATTENTION, (keys, hidden), layers, bias=qkv_bias),
        *linear("self_attn.v_proj", Kind.ATTENTION, (keys, hidden), layers, bias=qkv_bias),
        *linear("self_attn.o_proj", Kind.ATTENTION, (hidden, queries), layers, bias=out_bias),
    ]


def latent_attention(config: Fields) -> Groups:
    """Returns the projections of multi-head latent attention; queries go through a latent only if it has a rank."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads, rank = config.size("num_attention_heads"), config.size("kv_lora_rank")
    q_rank = config.optional_size("q_lora_rank")
    rope, nope, v_width = (config.size(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    has_bias, queries = config.flag("attention_bias"), heads * (rope + nope)
    through_latent = [
        *linear("self_attn.q_a_proj", Kind.ATTENTION, (q_rank or 0, hidden), layers, bias=has_bias),
        _tensor("self_attn.q_a_layernorm.weight", Kind.NORM, (q_rank or 0,), layers),
        *linear("self_attn.q_b_proj", Kind.ATTENTION, (queries, q_rank or 0), layers),
    ]
    direct = linear("self_attn.q_proj", Kind.ATTENTION, (queries, hidden), layers)
    return [
        *(through_latent if q_rank else direct),
        *linear("self_attn.kv_a_proj_with_mqa", Kind.ATTENTION, (rank + rope, hidden), layers, bias=has_bias),
        _tensor("self_attn.kv_a_layernorm.weight", Kind.NORM, (rank,), layers),
        *linear("self_attn.kv_b_proj", Kind.ATTENTION, (heads * (nope + v_width), rank), layers),
        *linear("self_attn.o_proj", Kind.ATTENTION, (hidden, heads * v_width), layers, bias=has_bias),
    ]


def mlp(
    config: Fields, *, part: str = "mlp", count: int | None = None, width: int | None = None, bias: bool = False
) -> Groups:
    """Returns the three matrices of a gated MLP; by default of every layer."""
    hidden, inner = config.size("hidden_size"), width or config.size("intermediate_size")
    layers = config.size("num_hidden_layers") if count is None else count
    return [
        *linear(f"{part}.gate_proj", Kind.MLP, (inner, hidden), layers, bias=bias),
        *linear(f"{part}.up_proj", Kind.MLP, (inner, hidden), layers, bias=bias),
        *linear(f"{part}.down_proj", Kind.MLP, (hidden, inner), layers, bias=bias),
    ]


def normed_attention(config: Fields) -> Groups:
    """Returns attention whose queries and keys are normalised."""
    has_bias, width, layers = config.flag("attention_bias"), head_dim(config), config.size("num_hidden_layers")
    return [
        *attention(config, qkv_bias=has_bias, out_bias=has_bias),
        _tensor("self_attn.q_norm.weight", Kind.NORM, (width,), layers),
        _tensor("self_attn.k_norm.weight", Kind.NORM, (width,), layers),
    ]


def fused_mlp(config: Fields) -> Groups:
    """Returns a gated MLP whose gate and up projection are one matrix."""
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    layers = config.size("num_hidden_layers")
    return [
        *linear("mlp.gate_up_proj", Kind.MLP, (2 * inner, hidden), layers),
        *linear("mlp.down_proj", Kind.MLP, (hidden, inner), layers),
    ]


def glm_layers(config: Fields) -> Groups:
    """Returns the attention and the MLP of GLM-4."""
    return [*attention(config, qkv_bias=config.flag("attention_bias")), *fused_mlp(config)]


def experts(config: Fields, count: int, width: int) -> Groups:
    """Returns the router and the routed experts of `count` layers."""
    hidden, num_experts = config.size("hidden_size"), config.size("num_experts")
    return [
        _tensor("mlp.gate.weight", Kind.ROUTER, (num_experts, hidden), count),
        _tensor("mlp.experts.gate_up_proj", Kind.EXPERT, (num_experts, 2 * width, hidden), count),
        _tensor("mlp.experts.down_proj", Kind.EXPERT, (num_experts, hidden, width), count),
    ]


def num_sparse_layers(config: Fields) -> int:
    """Returns the layers with experts: each `decoder_sparse_step`-th, but for those listed as dense."""
    step, layers = config.size("decoder_sparse_step"), config.size("num_hidden_layers")
    dense = {index for index in config.indices("mlp_only_layers") if 0 <= index < layers and (index + 1) % step == 0}
    return layers // step - len(dense)


def sparse_mlp(config: Fields) -> Groups:
    """Returns experts in sparse layers, and a gated MLP in the others."""
    sparse = num_sparse_layers(config)
    return [
        *mlp(config, count=config.size("num_hidden_layers") - sparse),
        *experts(config, sparse, config.size("moe_intermediate_size")),
    ]


def deepseek_mlp(config: Fields, *, bias: bool) -> Groups:
    """Returns the first dense layers, and routed and shared experts of the others."""
    layers, width = config.size("num_hidden_layers"), config.size("moe_intermediate_size")
    dense = min(config.count("first_k_dense_replace"), layers)
    shared = config.size("n_shared_experts") * width
    return [
        *mlp(config, count=dense, bias=bias),
        *experts(config, layers - dense, width),
        *mlp(config, part="mlp.shared_experts", count=layers - dense, width=shared, bias=bias),
    ]


def _tensor(name: str, kind: Kind, shape: tuple[int, ...], count: int) -> TensorGroup:
    return TensorGroup(name=name, kind=kind, shape=shape, count=count, is_linear=False)


def linear(name: str, kind: Kind, shape: tuple[int, int], count: int, *, bias: bool = False) -> Groups:
    """Returns the weight, and if it has one the bias, of a linear layer."""
    weight = TensorGroup(name=f"{name}.weight", kind=kind, shape=shape, count=count, is_linear=True)
    return [weight, _tensor(f"{name}.bias", kind, shape[:1], count)] if bias else [weight]
