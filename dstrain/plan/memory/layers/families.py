"""The layer code of each `model_type`: one row per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from dstrain.plan.memory.layers import blocks, dense, moe, vision
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.dense import Norm
from dstrain.plan.memory.layers.tape import Tensor

Layer = Callable[[Context, Tensor], Tensor]
Tower = Callable[[Context, Tensor, Tensor], vision.Seen]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCode:
    """How Transformers 5.23 computes a model of one family."""

    dense: Layer
    """A layer with a dense MLP."""
    sparse: Layer | None = None
    """A layer with experts."""
    norm: Norm = blocks.rms_norm
    """The norm after the last layer."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by a constant before the first layer."""
    scales_in_embedding: bool = False
    """Whether the embedding module itself does so."""
    rotates_by_kind: bool = False
    """Whether layers with a window rotate by tables of their own."""
    rotates_by_row: bool = False
    """Whether each row has tables of its own, as positions inside images differ."""
    tower: Tower | None = None
    """How images become features in the embeddings."""
    makes_idle_mask: bool = False
    """Whether a mask of windows is made even if no layer has windows."""
    scales_logits: bool = False
    """Whether logits are multiplied by a constant."""


_llama = partial(dense.prenorm, attend=dense.plain_attention, mlp=blocks.gated_mlp)
_qwen3 = partial(dense.prenorm, attend=dense.qwen3_attention, mlp=blocks.gated_mlp)
_qwen3_moe = partial(dense.prenorm, attend=dense.qwen3_attention, mlp=moe.qwen3_moe)
_latent_v2 = partial(dense.latent_attention, turn=dense.complex_rotary)
_latent_v3 = partial(dense.latent_attention, turn=dense.interleaved_rotary)
_glm = partial(dense.prenorm, attend=dense.glm_attention, mlp=blocks.fused_mlp)

_GEMMA3 = LayerCode(
    dense=partial(dense.sandwich, attend=dense.gemma3_attention, mlp=blocks.gated_mlp, norm=blocks.gemma_norm),
    norm=blocks.gemma_norm,
    scales_in_embedding=True,
    rotates_by_kind=True,
)

LAYER_CODE: Mapping[str, LayerCode] = MappingProxyType(
    {
        "deepseek_v2": LayerCode(
            dense=partial(dense.prenorm, attend=_latent_v2, mlp=blocks.gated_mlp),
            sparse=partial(dense.prenorm, attend=_latent_v2, mlp=moe.deepseek_v2),
        ),
        "deepseek_v3": LayerCode(
            dense=partial(dense.prenorm, attend=_latent_v3, mlp=blocks.gated_mlp),
            sparse=partial(dense.prenorm, attend=_latent_v3, mlp=moe.deepseek_v3),
        ),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "glm": LayerCode(dense=_glm),
        "glm4": LayerCode(
            dense=partial(dense.sandwich, attend=dense.glm_attention, mlp=blocks.fused_mlp, norm=blocks.rms_norm)
        ),
        "granite": LayerCode(dense=dense.granite, scales_embedding=True, scales_logits=True),
        "llama": LayerCode(dense=_llama),
        "ministral": LayerCode(dense=_llama),
        "mistral": LayerCode(dense=_llama),
        "mixtral": LayerCode(
            dense=_llama, sparse=partial(dense.prenorm, attend=dense.plain_attention, mlp=moe.mixtral)
        ),
        "phi3": LayerCode(dense=partial(dense.prenorm, attend=dense.fused_attention, mlp=blocks.fused_mlp)),
        "qwen2": LayerCode(dense=_llama),
        "qwen2_moe": LayerCode(
            dense=_llama,
            sparse=partial(dense.prenorm, attend=dense.plain_attention, mlp=moe.qwen2_moe),
            makes_idle_mask=True,
        ),
        "qwen3": LayerCode(dense=_qwen3),
        "qwen3_moe": LayerCode(dense=_qwen3, sparse=_qwen3_moe),
        "qwen3_vl": LayerCode(dense=_qwen3, rotates_by_row=True, tower=vision.qwen3_vl),
        "qwen3_vl_moe": LayerCode(dense=_qwen3, sparse=_qwen3_moe, rotates_by_row=True, tower=vision.qwen3_vl),
        "smollm3": LayerCode(dense=_llama),
    }
)
"""Layer code by `model_type`. To add a family: a module with its layer, and a row here."""
