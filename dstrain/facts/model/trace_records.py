"""Questions and answers of the meta-tensor tracer: the records that both processes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dstrain.choices import Attention, LossKernel, Method, Precision
from dstrain.facts.model.traits import FROZEN, Part
from dstrain.job.model_changes import Lora
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that a question is about."""

    __pydantic_config__ = type_config

    config: Mapping[str, Any]
    """Its config.json."""
    source: str | None = None
    """The folder or hub id of the model's own code, if Transformers has none."""
    trust_remote_code: bool = False


class Wanted(StrEnum):
    """The kind of answer."""

    DESCRIPTION = "description"
    TRACE = "trace"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A way to train a model, and the kind of answer.

    A `Description` depends on the model alone. A `Trace` is one forward and backward pass. An `ActivationProfile`
    covers every micro-batch and depth, with and without checkpointing, and ignores these three fields.
    """

    __pydantic_config__ = type_config

    subject: Subject
    wanted: Wanted = Wanted.TRACE
    num_hidden_layers: int | None = None
    """The number of leading decoder layers to keep; None: all."""
    micro_batch: int = 1
    """Batch size of `input_ids`: (micro_batch, seq_len)."""
    seq_len: int = 1024
    method: Method = Method.FULL
    """4-bit weights cannot be traced."""
    lora: Lora = field(default_factory=Lora)
    attn: Attention = Attention.SDPA
    has_padding: bool = False
    """Whether the attention mask contains padding."""
    is_packed: bool = False
    """Whether rows hold several samples, with `position_ids` that restart within a row."""
    grad_ckpt: bool = False
    is_reentrant: bool = False
    """Whether checkpointing uses its older, reentrant form."""
    precision: Precision = Precision.BF16
    """Dtype of parameters and activations."""
    loss: LossKernel = LossKernel.FULL
    """How the loss is computed; a model that cannot do so fused does so chunked, or in full."""
    image_patches: int = 0
    """Patches of the single image of each sample; packed rows are full of them."""
    frozen_parts: tuple[Part, ...] = tuple(sorted(FROZEN))
    """The parts of a vision-language model that do not train."""
    holds_outputs: bool = False
    """Whether outputs such as logits stay alive during the backward pass; the Trainer drops them."""
    round_bytes: int = 512
    """Granularity of storages: 512 in the CUDA caching allocator, 1 for plain bytes."""
    every_moment: bool = False
    """Whether segments contain all local maxima instead of the highest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes at one moment besides parameters and buffers."""

    __pydantic_config__ = type_config

    activations: int
    """Inputs, activations and their gradients."""
    logits: int
    """Allocations of head and loss: logits, their copies and gradients."""
    grads: int
    """Gradients of parameters."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return self.activations + self.logits + self.grads


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A named part of the pass, in one layer or outside the layers."""

    __pydantic_config__ = type_config

    name: str
    """`vision forward`, `embedding forward`, `layer forward`, `norm forward`, `loss forward`, `loss backward`,
    `head backward`, `layer backward`, `embedding backward` or `vision backward`."""
    layer: int | None
    """The layer, from 0, or None outside the layers."""
    moments: tuple[Moment, ...]
    """Moments right before storage is freed, in order."""

    @property
    def highest(self) -> Moment:
        """The moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Live bytes of one pass besides parameters and buffers."""

    __pydantic_config__ = type_config

    segments: tuple[Segment, ...]
    """The whole pass, in order."""
    saved_bytes: tuple[int, ...]
    """Bytes that each layer but the last saves for the backward pass: the growth of live bytes until the next layer
    begins. The input of the first layer counts as saved by it."""
    params_bytes: int
    """Bytes of parameters; tied ones count once."""
    trainable_bytes: int
    """Bytes of trainable parameters."""
    inputs_bytes: int
    """Bytes of token ids, labels, masks and pixels, included in the activations of every moment."""
    loss: LossKernel = LossKernel.FULL
    """How the loss was computed."""

    @property
    def highest(self) -> Segment:
        """The segment with the most live bytes."""
        return max(self.segments, key=lambda segment: segment.highest.total)

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes, gradients of parameters included."""
        return self.highest.highest.total

    @property
    def peak_instant(self) -> str:
        """Name of the segment with the peak."""
        return self.highest.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter tensor of a model."""

    __pydantic_config__ = type_config

    name: str
    """Its full name, such as `model.layers.0.self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    layer: int | None
    """Index of the decoder layer, or None outside the layers."""
    role: str
    """`embedding`, `head`, `norm`, `vision` or `other`."""
    is_linear: bool
    """Whether it is the weight of a `torch.nn.Linear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A model as Transformers builds it."""

    __pydantic_config__ = type_config

    model_type: str
    sizes: Mapping[str, int]
    """Field of ModelFacts → its value, for fields that the config has."""
    vision_sizes: Mapping[str, int]
    """The same for Vision; empty for a language model."""
    rotary_ratio: float
    """Share of a head with rotary position embedding, 0…1."""
    tie_word_embeddings: bool
    dtype: str
    """The dtype in the config."""
    layers_root: str
    """The prefix of layer names, such as `model.layers`."""
    layer_kinds: tuple[int, ...]
    """One number per layer; layers with equal numbers are identical."""
    moe_block: str | None
    """Class of the module with router and experts, or None."""
    parameters: tuple[Parameter, ...]
    """Every parameter tensor; tied ones once."""
    num_scored_layers: int | None = None
    """Layers whose attention scores pairs of positions; None: all."""
    linear_state_numel: int = 0
    """Elements of the recurrent states of all layers with linear attention."""
    has_sdpa: bool = True
    """Whether Transformers computes its attention by PyTorch's kernel too."""
    has_flash: bool = True
    """Whether Transformers computes the attention of all its parts by FlashAttention 2 and 3."""
