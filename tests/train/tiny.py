"""Sizes of tiny models."""

from __future__ import annotations

from typing import Any

VISION_IDS: dict[str, Any] = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
"""Ids of the tokens around an image and a video."""


def sizes(hidden_size: int = 32, *, layers: int = 2, heads: int = 2, kv_heads: int = 2, **more: Any) -> dict[str, Any]:
    """Returns the keys of a decoder's configuration, of which `more` replace others."""
    return {
        "vocab_size": 96,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        **more,
    }


def experts(count: int, **more: Any) -> dict[str, Any]:
    """Returns the keys of a mixture's configuration, whatever a family calls the number of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return {**dict.fromkeys(names, count), "num_experts_per_tok": 2, "moe_intermediate_size": 16, **more}


def latent(**more: Any) -> dict[str, Any]:
    """Returns the keys of attention with a latent state and of grouped experts behind a dense first layer."""
    return {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,  # what is rotated
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        **more,
    }
