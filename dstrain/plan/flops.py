"""Floating-point operations of training one token, for MFU and, later, step time."""

from __future__ import annotations

from dstrain.choices import Method
from dstrain.facts.model import Kind, ModelFacts


def flops_per_token(model: ModelFacts, *, method: Method, seq_len: int) -> float:
    """Returns the model FLOPs of one trained token: 6·N + 6·L·H·d·s, or 4·N + 6·L·H·d·s with a frozen base.

    N are the active parameters without the embedding table (its lookup multiplies nothing; a tied head does), L layers
    of H heads of d elements, s the sequence length, halved for causal attention. Recomputation does not count: it is
    not the model's. Source: PaLM (arXiv 2204.02311), appendix B, with the causal half; LoRA has no weight gradients.
    """
    multiplied = model.num_active_params - model.num_params_of(Kind.EMBEDDING)
    if model.tie_word_embeddings:
        multiplied += model.vocab_size * model.hidden_size
    per_param = 6 if method is Method.FULL else 4
    per_head = (model.head_dim + model.v_head_dim) / 2
    attention = 6 * model.num_hidden_layers * model.num_attention_heads * per_head * seq_len
    return per_param * multiplied + attention
