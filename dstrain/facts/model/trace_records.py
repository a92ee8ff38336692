"""Questions to and answers of the meta-tensor tracer: the records that both processes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dstrain.choices import Attention, Method, Precision
from dstrain.job.schema import Lora
from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that a question is about."""

    __pydantic_config__ = type_config

    config: Mapping[str, Any]
    """Its config.json."""
    source: str | None = None
    """The folder or hub id that brings its code, where Transformers has none."""
    trust_remote_code: bool = False
    """Whether that code may run."""


class Wanted(StrEnum):
    """What is asked about a model."""

    DESCRIPTION = "description"
    TRACE = "trace"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A way to train a model, and what is wanted of it.

    A `Description` needs the model alone. A `Trace` is one forward and backward pass. An `ActivationProfile` holds for
    every micro-batch and depth, with and without checkpointing, so that it has no use for these three fields.
    """

    __pydantic_config__ = type_config

    subject: Subject
    """The model."""
    wanted: Wanted = Wanted.TRACE
    """What is asked."""
    num_hidden_layers: int | None = None
    """Decoder layers, the first so many of the model's; None: all."""
    micro_batch: int = 1
    """Samples."""
    seq_len: int = 1024
    """Tokens of each sample."""
    method: Method = Method.FULL
    """What is trained; 4-bit weights cannot be traced."""
    lora: Lora = field(default_factory=Lora)
    """The adapter, for LoRA."""
    attn: Attention = Attention.SDPA
    """Attention implementation."""
    has_padding: bool = False
    """Whether there is an attention mask with padding in it."""
    is_packed: bool = False
    """Whether rows hold several samples: positions are given, and begin anew within a row."""
    grad_ckpt: bool = False
    """Whether activations are recomputed."""
    is_reentrant: bool = False
    """Whether they are recomputed by the older, re-entrant form of checkpointing."""
    precision: Precision = Precision.BF16
    """Dtype of parameters and activations."""
    image_patches: int = 0
    """Patches of the one image in each sample."""
    trains_vision: bool = False
    """Whether the vision tower trains too; dstrain freezes it."""
    holds_outputs: bool = False
    """Whether the model's outputs, logits among them, live on through the backward pass; the Trainer drops them."""
    round_bytes: int = 512
    """Every storage is rounded up to a multiple of it: 512 in the CUDA caching allocator, 1 for plain bytes."""
    every_moment: bool = False
    """Whether each segment gives all its local maxima instead of the highest alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive at one moment beside parameters and buffers, in bytes."""

    __pydantic_config__ = type_config

    activations: int
    """Inputs, activations and their gradients."""
    logits: int
    """What the head and the loss allocated: logits, their copies and gradients."""
    grads: int
    """Gradients of parameters."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.logits + self.grads


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A named stretch of the pass: an instant of the plan, in one layer or outside the layers."""

    __pydantic_config__ = type_config

    name: str
    """`vision forward`, `embedding forward`, `layer forward`, `norm forward`, `loss forward`, `loss backward`,
    `head backward`, `layer backward`, `embedding backward` or `vision backward`."""
    layer: int | None
    """The layer, from 0, or None outside the layers."""
    moments: tuple[Moment, ...]
    """Moments before something is freed, in order."""

    @property
    def highest(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one pass needs beyond parameters and buffers."""

    __pydantic_config__ = type_config

    segments: tuple[Segment, ...]
    """The pass from beginning to end."""
    saved_bytes: tuple[int, ...]
    """What each layer but the last leaves for the backward pass: the growth of live bytes from its beginning to that of
    the next. The first layer's input, held by the model's frame, counts as its own."""
    params_bytes: int
    """Bytes of parameters, tied ones once."""
    trainable_bytes: int
    """Bytes of those that train."""
    inputs_bytes: int
    """Bytes of token ids, labels, masks and pixels, which are part of every moment's activations."""

    @property
    def highest(self) -> Segment:
        """The segment in which most bytes are alive."""
        return max(self.segments, key=lambda segment: segment.highest.total)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are alive at once, gradients of parameters included."""
        return self.highest.highest.total

    @property
    def peak_instant(self) -> str:
        """The name of that instant."""
        return self.highest.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter tensor of a model."""

    __pydantic_config__ = type_config

    name: str
    """Its full name, such as `model.layers.0.self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    layer: int | None
    """The decoder layer it is in, or None."""
    role: str
    """`embedding`, `head`, `norm`, `vision` or `other`."""
    is_linear: bool
    """Whether it is the weight of a `torch.nn.Linear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A model as Transformers builds it."""

    __pydantic_config__ = type_config

    model_type: str
    """`model_type` of its config."""
    sizes: Mapping[str, int]
    """The usual sizes, by the names of ModelFacts, as far as its config has them."""
    vision_sizes: Mapping[str, int]
    """Sizes of its vision tower, by the names of Vision, as far as the config has them; empty for a language model."""
    rotary_ratio: float
    """Share of a head that is rotated by position, 0…1."""
    tie_word_embeddings: bool
    """Whether the head is the embedding."""
    dtype: str
    """The dtype its config says."""
    layers_root: str
    """The name before a layer's number, such as `model.layers`."""
    layer_kinds: tuple[int, ...]
    """One number for each layer; layers of the same number are alike."""
    moe_block: str | None
    """The class name of the module that holds router and experts, or None."""
    parameters: tuple[Parameter, ...]
    """Every parameter tensor, tied ones once."""
