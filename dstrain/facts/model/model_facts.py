"""Facts about a model: its shape and every parameter tensor, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.facts.model.traced_activations import Traced
from dstrain.records import type_config


class Kind(StrEnum):
    """What a parameter tensor belongs to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    ROUTER = "router"
    NORM = "norm"
    HEAD = "head"
    VISION = "vision"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """`count` parameter tensors of the same name and shape, one in each layer that has them."""

    name: str
    """The name below the layer, such as `self_attn.q_proj.weight`; outside the layers, the full name."""
    kind: Kind
    """What it belongs to."""
    shape: tuple[int, ...]
    """Its shape, as Transformers 5 stores it (the experts of one layer are one 3-D tensor)."""
    count: int
    """How many such tensors the model has."""
    is_linear: bool
    """Whether it is the weight of a `torch.nn.Linear`, which an adapter can wrap: shape (out, in)."""

    @property
    def numel(self) -> int:
        """Elements of one tensor."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts."""

    num_experts: int
    """Routed experts in one MoE layer."""
    experts_per_token: int
    """Routed experts that each token visits."""
    intermediate_size: int
    """Inner width of one routed expert."""
    shared_intermediate_size: int
    """Summed inner width of the experts that every token visits; 0 where there are none."""
    num_moe_layers: int
    """Layers with experts; the others are dense."""
    block_class: str
    """Class name of the MoE block in Transformers, which ZeRO-3 must gather as one leaf module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision tower of a vision-language model."""

    hidden_size: int
    """Width of the tower."""
    num_layers: int
    """Blocks in the tower."""
    num_heads: int
    """Attention heads of each block."""
    intermediate_size: int
    """Inner width of each block's MLP."""
    patch_size: int
    """Pixels on the side of one patch."""
    spatial_merge_size: int
    """Patches on each side that are merged into one token of the language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model, as far as memory and speed depend on it."""

    __pydantic_config__ = type_config

    name: str
    """What people call it: an alias, a hub id, or the folder's name."""
    source: str
    """What `from_pretrained` is given: a hub id or a local folder."""
    model_type: str
    """`model_type` of config.json."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    head_dim: int
    """Elements of one query head."""
    v_head_dim: int
    """Elements of one value head; differs from `head_dim` for multi-head latent attention."""
    rotary_dim: int
    """Elements of one query head that are rotated by position."""
    intermediate_size: int
    """Inner width of a dense MLP."""
    vocab_size: int
    """Rows of the embedding."""
    max_position_embeddings: int
    """Longest sequence the model was made for."""
    tie_word_embeddings: bool
    """Whether the head is the embedding."""
    has_qk_norm: bool
    """Whether queries and keys are normalised per head."""
    dtype: str
    """The dtype the weights were trained and are stored in: `bfloat16`, `float16` or `float32`."""
    moe: Moe | None
    """The experts, or None for a dense model."""
    vision: Vision | None
    """The vision tower, or None for a language model."""
    tensors: tuple[TensorGroup, ...]
    """Every parameter tensor; tied ones once."""
    sliding_window: int | None = None
    """Tokens that a layer with a window looks back, or None where no layer has one."""
    num_windowed_layers: int = 0
    """Decoder layers with a window."""
    traced: Traced | None = None
    """What a trace of Transformers' own code found, where the family is not known."""

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(group.numel * group.count for group in self.tensors)

    def num_params_of(self, *kinds: Kind) -> int:
        """Parameters of the given kinds."""
        return sum(group.numel * group.count for group in self.tensors if group.kind in kinds)

    @property
    def num_active_params(self) -> int:
        """Parameters that one text token meets: of the routed experts, only those it visits; no vision tower."""
        experts = self.num_params_of(Kind.EXPERT)
        if self.moe is not None:
            experts = experts * self.moe.experts_per_token // self.moe.num_experts
        return self.num_params - self.num_params_of(Kind.EXPERT, Kind.VISION) + experts

    @property
    def largest_tensor_numel(self) -> int:
        """Elements of the largest parameter tensor, which ZeRO gathers and reduces whole."""
        return max(group.numel for group in self.tensors)
