"""Questions and answers of the meta-tensor tracer, and traces extrapolated to every depth and micro-batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dstrain.choices import Attention, LossKernel, Method, Precision
from dstrain.errors import InvalidConfig
from dstrain.facts.model.traits import FROZEN, Part
from dstrain.job.model_changes import Lora
from dstrain.records import type_config
from dstrain.units import counted


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


BATCHES = (1, 2)
"""Micro-batches that are traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """The two depths to trace, in layers, from which the whole model is extrapolated."""

    few: int
    more: int
    """Equal to `few` if the model is too short for two depths."""
    different: int = 0
    """Leading layers that are not part of the period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Bytes as base + per_layer·l + per_sample·b + per_both·l·b, for l layers and b samples beyond its origin."""

    __pydantic_config__ = type_config

    base: float
    """Bytes at the origin."""
    per_layer: float
    """Bytes of a layer, whatever the samples."""
    per_sample: float
    """Bytes of a sample, whatever the layers."""
    per_both: float
    """Bytes of a sample in a layer."""

    def at(self, layers: int, samples: int) -> int:
        """Returns the bytes at this distance from the origin."""
        return round(self.base + self.per_layer * layers + (self.per_sample + self.per_both * layers) * samples)

    def never_exceeds(self, other: Plane) -> bool:
        """Returns whether this plane is at most the other one, at the origin and everywhere beyond it."""
        return (
            self.base <= other.base
            and self.per_layer <= other.per_layer
            and self.per_sample <= other.per_sample
            and self.per_both <= other.per_both
        )

    def __add__(self, other: Plane) -> Plane:
        return Plane(
            base=self.base + other.base,
            per_layer=self.per_layer + other.per_layer,
            per_sample=self.per_sample + other.per_sample,
            per_both=self.per_both + other.per_both,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A `Moment` as a function of depth and micro-batch."""

    __pydantic_config__ = type_config

    name: str
    """The name of its segment."""
    activations: Plane
    logits: Plane
    grads: Plane

    def never_exceeds(self, other: Course) -> bool:
        """Returns whether the other moment is never lower, with and without gradients of parameters."""
        mine, others = self.activations + self.logits, other.activations + other.logits
        return mine.never_exceeds(others) and (mine + self.grads).never_exceeds(others + other.grads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak(Moment):
    """The highest moment of a segment; no gradient is reduced or partitioned yet."""

    name: str
    """The name of the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationProfile:
    """Live bytes of a training pass, for one sequence length and one method and any micro-batch."""

    __pydantic_config__ = type_config

    num_layers: int
    """Layers at the origin of the planes."""
    is_for_any_depth: bool
    """Whether it covers other depths; False if the model is too short or irregular for two traces."""
    kept: tuple[Course, ...]
    """Moments without checkpointing that can be the highest of their segment."""
    recomputed: tuple[Course, ...]
    """The same with activation checkpointing."""
    loss: LossKernel = LossKernel.FULL
    """How the loss was computed."""

    def moments(self, *, num_layers: int, micro_batch: int, grad_ckpt: bool) -> tuple[Peak, ...]:
        """Returns every moment that can be the highest of its segment, with or without gradients of parameters.

        Raises InvalidConfig for a depth that the profile does not cover.
        """
        layers = num_layers - self.num_layers
        if layers < 0 or (layers and not self.is_for_any_depth):
            raise InvalidConfig(f"the traced model has {counted(self.num_layers, 'layer')}, not {num_layers}")
        samples = micro_batch - BATCHES[0]
        return tuple(
            Peak(
                name=course.name,
                activations=course.activations.at(layers, samples),
                logits=course.logits.at(layers, samples),
                grads=course.grads.at(layers, samples),
            )
            for course in (self.recomputed if grad_ckpt else self.kept)
        )

    def peaks(self, *, num_layers: int, micro_batch: int, grad_ckpt: bool) -> tuple[Peak, ...]:
        """Returns the highest moment of each segment, gradients of parameters included, in the order of the pass."""
        highest: dict[str, Peak] = {}
        for peak in self.moments(num_layers=num_layers, micro_batch=micro_batch, grad_ckpt=grad_ckpt):
            if peak.name not in highest or peak.total > highest[peak.name].total:
                highest[peak.name] = peak
        return tuple(highest.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Memory use of a model without a layer model of dstrain's, for one way of training."""

    __pydantic_config__ = type_config

    note: str
    """The origin of these figures, for people."""
    profile: ActivationProfile
    """Live bytes of every micro-batch and depth."""


def depths(layer_kinds: Sequence[int]) -> Depths:
    """Returns the depths to trace: the different leading layers plus one and two periods of the others.

    After the leading layers, kinds repeat with a period (1 if all layers are identical). The two depths are one period
    apart, and the whole model is a multiple of the period deeper, so that the last layers are always the same.

    >>> depths([0] * 32), depths([0, 0, 0] + [1] * 58), depths(([0] * 5 + [1]) * 4 + [0] * 2)
    (Depths(few=2, more=3, different=0), Depths(few=4, more=5, different=3), Depths(few=8, more=14, different=0))
    """
    count = len(layer_kinds)
    first, period = min(
        ((_first_of_period(layer_kinds, period), period) for period in range(1, count + 1)), key=lambda pair: sum(pair)
    )
    few = max(first + period, 2)
    few += (count - few) % period
    if few + period > count:
        return Depths(few=count, more=count, different=first)
    return Depths(few=few, more=few + period, different=first)


def _first_of_period(kinds: Sequence[int], period: int) -> int:
    """Returns the first layer from which kinds repeat."""
    first = max(len(kinds) - period, 0)
    while first and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    return first


Corners = Mapping[tuple[int, int], Trace]
"""Traces by layers and samples."""


def fit(depth: Depths, *, kept: Corners, recomputed: Corners) -> ActivationProfile:
    """Returns the profile through traces of one or two depths, each with `BATCHES`, without and with checkpointing.

    Bytes are affine in depth and, but for the rounding of storages, in samples. Compared with traces of other depths
    and micro-batches the highest moment is the same to the byte (ten architectures, 7 and 14 layers, 1 to 8 samples).
    """
    return ActivationProfile(
        num_layers=depth.few,
        is_for_any_depth=depth.more > depth.few,
        kept=_courses(kept, depth),
        recomputed=_courses(recomputed, depth),
        loss=next(iter(kept.values())).loss,
    )


_Key = tuple[str, int | None, int]


def _courses(traces: Corners, depth: Depths) -> tuple[Course, ...]:
    """Returns the moments that can be the highest of their segment."""
    corners = [
        _segments(traces[layers, samples], layers, depth) for layers in (depth.few, depth.more) for samples in BATCHES
    ]
    by_name: dict[str, list[Course]] = defaultdict(list)
    for key in corners[0]:
        if all(key in corner for corner in corners):
            moments = [corner[key].moments for corner in corners]
            by_name[key[0]] += _aligned(key[0], moments, depth.more - depth.few)
    return tuple(course for courses in by_name.values() for course in _highest(courses))


def _segments(trace: Trace, num_layers: int, depth: Depths) -> dict[_Key, Segment]:
    """Returns the segments by name, place and occurrence.

    A layer's place is its index, and for layers of the period also its index from the end.
    """
    segments: dict[_Key, Segment] = {}
    seen: Counter[tuple[str, int | None]] = Counter()
    for segment in trace.segments:
        places: list[int | None] = [None]
        if segment.layer is not None:
            both = (segment.layer, segment.layer - num_layers)
            places = [place for place in both if depth.different - depth.few <= place < depth.few]
        for place in places:
            segments[segment.name, place, seen[segment.name, place]] = segment
            seen[segment.name, place] += 1
    return segments


def _aligned(name: str, corners: Sequence[Sequence[Moment]], layers: int) -> list[Course]:
    """Returns a course per moment if all corners have the same number of moments, else one through the highest."""
    if len({len(moments) for moments in corners}) > 1:
        corners = [[max(moments, key=lambda moment: moment.total)] for moments in corners]
    return [
        Course(
            name=name,
            activations=_plane([moment.activations for moment in moments], layers),
            logits=_plane([moment.logits for moment in moments], layers),
            grads=_plane([moment.grads for moment in moments], layers),
        )
        for moments in zip(*corners, strict=True)
    ]


def _plane(values: Sequence[int], layers: int) -> Plane:
    """Returns the plane through four values: few and more layers, each with one and two samples."""
    few_one, few_two, more_one, more_two = values
    step = layers or 1
    return Plane(
        base=few_one,
        per_layer=(more_one - few_one) / step,
        per_sample=few_two - few_one,
        per_both=(more_two - more_one - few_two + few_one) / step,
    )


def _highest(courses: list[Course]) -> list[Course]:
    """Returns the courses that no other one always exceeds."""
    left: list[Course] = []
    for course in courses:
        if not any(course.never_exceeds(other) for other in left):
            left = [other for other in left if not other.never_exceeds(course)]
            left.append(course)
    return left
