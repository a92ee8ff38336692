"""Bytes that the forward pass keeps for the backward pass, and those of logits and loss."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.choices import Attention, Method, Precision
from dstrain.facts.model import Kind, ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.params import adapted


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activation memory of one micro-batch on one GPU, in bytes."""

    kept: int
    """Kept from forward to backward by all layers: their inputs when checkpointing, else everything."""
    layer: int
    """Held by one layer in its backward pass, on top of `kept` (0 without checkpointing: it is in `kept`)."""
    outside: int
    """Final norm, rotary tables and token ids."""
    loss: int
    """Logits and their copies at the backward pass of the loss."""
    layer_work: int
    """Gradients of one layer's inputs and its largest weight gradient while it runs backward."""


def bytes_per_token_per_layer(model: ModelFacts, configuration: Configuration) -> float:
    """Returns what one decoder layer keeps of one token in bf16, without checkpointing.

    With hidden size h, queries q = H·d, keys k = K·d and MLP width I: 16h + 8 + 4q + 4k + 4H + 8I; normalised queries
    and keys add 6(q + k) + 4(H + K); an MoE layer with E experts, k of width M each visited, has
    k(4h + 8M) + 4E + 38k and its shared experts in place of 8I.
    A padding mask under sdpa repeats keys and values
    (4q − 4k) and adds a mask; eager attention keeps 8·H·seq_len. An adapter drops the norms' copies.
    Source: counted from tensors saved by Transformers 5.23's layers, equal to 0.5 B; GPU runs of Llama-3.1-8B and
    Mistral-7B publish the same 28·h·2 B.
    """
    h, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    q, k = heads * model.head_dim, kv_heads * model.head_dim
    total = 16 * h + 8 + 4 * q + 4 * k + 4 * heads + _mlp_bytes_per_token(model)
    if model.has_qk_norm:
        total += 6 * (q + k) + 4 * (heads + kv_heads)
    if configuration.attn is Attention.EAGER:
        total += 8 * heads * configuration.seq_len
    elif configuration.attn is Attention.SDPA and not configuration.packing and configuration.micro_batch > 1:
        total += 4 * (q - k) + 3 * configuration.seq_len
    if configuration.method is not Method.FULL:
        total += _adapter_bytes_per_token(model, configuration)
    return total * (2.0 if configuration.precision is Precision.FP32 else 1.0)


def _mlp_bytes_per_token(model: ModelFacts) -> float:
    """Returns what the MLP keeps of one token, averaged over dense and MoE layers."""
    dense = 8 * model.intermediate_size
    if model.moe is None:
        return dense
    moe = model.moe
    sparse = (
        moe.experts_per_token * (4 * model.hidden_size + 8 * moe.intermediate_size + 38)
        + 4 * moe.num_experts
        + 8 * moe.shared_intermediate_size
    )
    share = moe.num_moe_layers / model.num_hidden_layers
    return share * sparse + (1 - share) * dense


def _adapter_bytes_per_token(model: ModelFacts, configuration: Configuration) -> float:
    """Returns what adapters change: frozen norms keep no normalised copy; rank outputs; dropout keeps output and mask.

    Source: counted from tensors saved by peft 0.21 under Transformers 5.23 (mean error 0.14 %, worst 2.4 %).
    """
    layers = model.num_hidden_layers
    q, k = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    change = -4.0 * model.hidden_size - (2 * (q + k) if model.has_qk_norm else 0)
    for group in adapted(model, configuration.lora):
        per_layer = group.count / layers
        change += 2 * configuration.lora.rank * per_layer
        if configuration.lora.dropout > 0:
            change += 3 * group.shape[1] * per_layer
    return change


def activations(model: ModelFacts, configuration: Configuration) -> Activations:
    """Returns the activation memory of one micro-batch of T tokens.

    Checkpointing keeps s·h of each token and layer. The loss holds 12 B for each of T·V logits in its backward pass:
    fp32 log-softmax 4, its gradient 4 + 4; the logits themselves are gone by then.
    Source: Transformers 5.23 loss/loss_utils.py: ForCausalLMLoss; published peaks of the Liger kernel benchmark on an
    A100 equal these formulas to 16.25 MiB of cuBLAS workspace.
    """
    s, h = configuration.precision.num_bytes, model.hidden_size
    tokens, layers = configuration.tokens_per_micro_batch, model.num_hidden_layers
    each = bytes_per_token_per_layer(model, configuration)
    per_layer_kept = s * h if configuration.grad_ckpt else each
    width = model.moe.experts_per_token * model.moe.intermediate_size if model.moe else model.intermediate_size
    weight_grad = 0 if configuration.method is not Method.FULL else s * _largest_layer_weight(model)
    return Activations(
        kept=round(layers * per_layer_kept * tokens),
        layer=round(each * tokens) if configuration.grad_ckpt else 0,
        outside=round((4 + 2 * s) * h * tokens),
        loss=12 * tokens * model.vocab_size,
        layer_work=round(s * (h + width) * tokens) + weight_grad,
    )


def _largest_layer_weight(model: ModelFacts) -> int:
    """Returns the elements of the largest weight inside a layer."""
    inner = (Kind.ATTENTION, Kind.MLP, Kind.EXPERT)
    return max((group.numel for group in model.tensors if group.kind in inner), default=0)
