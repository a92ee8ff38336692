"""Facts about a model: its shape and every parameter tensor, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstrain.facts.model.traces import Traced
from dstrain.records import type_config


class Kind(StrEnum):
    """The part of a model that a parameter tensor belongs to."""

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
    """`count` parameter tensors with the same name and shape, in different layers."""

    name: str
    """The name relative to the layer, such as `self_attn.q_proj.weight`; outside layers, the full name."""
    kind: Kind
    shape: tuple[int, ...]
    """Shape in Transformers 5; the experts of one layer are one 3-D tensor: (experts, out, in)."""
    count: int
    is_linear: bool
    """Whether it is the weight of a `torch.nn.Linear`, shape (out, in), which an adapter can wrap."""
    frozen: tuple[int, ...] = ()
    """Numbers of the `count` tensors that a job freezes, from 0; without a job all of a vision tower."""

    @property
    def is_quantizable(self) -> bool:
        """Whether QLoRA holds it in 4 bits: linears outside the head and the vision tower."""
        return self.is_linear and self.kind not in (Kind.HEAD, Kind.VISION)

    @property
    def num_trained(self) -> int:
        """Elements of the tensors that train if all of the model does."""
        return self.numel * (self.count - len(self.frozen))

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
    """Routed experts per MoE layer."""
    experts_per_token: int
    """Routed experts per token (top-k)."""
    intermediate_size: int
    """Inner width of one routed expert."""
    shared_intermediate_size: int
    """Total inner width of the shared experts; 0 without them."""
    num_moe_layers: int
    """Number of layers with experts; the others are dense."""
    block_class: str
    """Class of the MoE block in Transformers, a leaf module for ZeRO-3."""
    asks_for_router_loss: bool = False
    """Whether config.json asks for the loss that balances experts (`output_router_logits`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The vision tower of a vision-language model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    """Inner width of the MLP."""
    patch_size: int
    """Side of a patch, in pixels."""
    spatial_merge_size: int
    """Side of the square of patches that becomes one token of the language model."""
    crop_patches: int | None = None
    """Patches of an image or a crop, which attend to no other image's; None: images have any size."""
    num_full_layers: int | None = None
    """Layers whose patches see all others of an image, in place of those in a window; None: all."""

    def num_tokens(self, patches: int) -> int:
        """Returns the tokens of the language model that patches become."""
        return patches // self.spatial_merge_size**2

    def attention_flops(self, patches: int) -> float:
        """Returns the FLOPs of a patch's attention, forward, in a sample of so many; in windows they are few."""
        num_layers = self.num_layers if self.num_full_layers is None else self.num_full_layers
        return 4.0 * min(patches, self.crop_patches or patches) * num_layers * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The properties of a model that memory and speed depend on."""

    __pydantic_config__ = type_config

    name: str
    """Display name: an alias, a hub id, or the folder's name."""
    source: str
    """Argument of `from_pretrained`: a hub id or a local folder."""
    model_type: str
    """`model_type` of config.json."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    head_dim: int
    """Width of a query and key head."""
    v_head_dim: int
    """Width of a value head; differs from `head_dim` in multi-head latent attention."""
    rotary_dim: int
    """Elements of a query head with rotary position embedding."""
    intermediate_size: int
    """Inner width of a dense MLP."""
    vocab_size: int
    """Rows of the embedding."""
    max_position_embeddings: int
    """Longest sequence the model supports, in tokens, with the scaling in its config.json."""
    tie_word_embeddings: bool
    """Whether the head shares the embedding's weights."""
    has_qk_norm: bool
    """Whether queries and keys are normalized per head."""
    dtype: str
    """The dtype of the checkpoint: `bfloat16`, `float16` or `float32`."""
    moe: Moe | None
    """None for a dense model."""
    vision: Vision | None
    """None for a language model."""
    tensors: tuple[TensorGroup, ...]
    """Every parameter tensor; tied ones once."""
    layers_root: str = "model.layers"
    """The name of the list of decoder layers."""
    sliding_window: int | None = None
    """Window in tokens of the layers with sliding-window attention, or None."""
    num_windowed_layers: int = 0
    num_scored_layers: int | None = None
    """Layers whose attention scores pairs of positions; None: all. The others have linear attention, or none."""
    linear_state_numel: int = 0
    """Elements of the recurrent states of all layers with linear attention: heads × key width × value width."""
    has_sdpa: bool = True
    """Whether Transformers computes its attention by PyTorch's kernel; gpt-oss's sinks have only eager and flash."""
    has_flash: bool = True
    """Whether Transformers computes the attention of all its parts by FlashAttention 2 and 3."""
    rope_type: str = "default"
    """How config.json scales rotary positions already (`llama3`, `yarn`, …), or `default`."""
    traced: Traced | None = None
    """Activations from a trace of Transformers' own code, if the family is unknown."""

    @property
    def has_tower(self) -> bool:
        """Whether the model has a vision tower, perhaps one whose sizes are not known."""
        return self.vision is not None or any(group.kind is Kind.VISION for group in self.tensors)

    @property
    def num_attention_layers(self) -> int:
        """Layers whose attention scores pairs of positions."""
        return self.num_hidden_layers if self.num_scored_layers is None else self.num_scored_layers

    @property
    def has_linear_layers(self) -> bool:
        """Whether some layer carries a state along the sequence: linear attention, state spaces, convolutions."""
        return self.num_scored_layers is not None or self.linear_state_numel > 0

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(group.numel * group.count for group in self.tensors)

    def num_params_of(self, *kinds: Kind) -> int:
        """Parameters of the given kinds."""
        return sum(group.numel * group.count for group in self.tensors if group.kind in kinds)

    @property
    def num_active_params(self) -> int:
        """Parameters used by one text token: only the routed experts of its top-k, and no vision tower."""
        experts = self.num_params_of(Kind.EXPERT)
        if self.moe is not None:
            experts = experts * self.moe.experts_per_token // self.moe.num_experts
        return self.num_params - self.num_params_of(Kind.EXPERT, Kind.VISION) + experts

    @property
    def largest_tensor_numel(self) -> int:
        """Elements of the largest parameter tensor; ZeRO gathers and reduces it as a whole."""
        return max(group.numel for group in self.tensors)
