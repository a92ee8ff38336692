"""Traits of the families of Transformers beside their shapes: images and their towers, kernels, and packages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from dstrain.errors import InvalidConfig, not_installed

FLA, CONV, MAMBA = "flash-linear-attention", "causal-conv1d", "mamba-ssm"
DISTRIBUTIONS = (FLA, CONV, MAMBA)
"""Packages with kernels for linear attention, convolutions and state spaces, as pip names them."""
LIGER_RELEASES = ">=0.8.5,<0.9"
"""Releases of liger-kernel that replace the parts that are planned (`families.LIGER`)."""
COST = (
    "a step of Qwen3.5-9B took 1.22 in place of 0.70 s on 8 B200 (transformers#48718),"
    " and 12 of its layers needed 14.2 in place of 12.4 GiB of an H200"
)
"""Cost of training without flash-linear-attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedParts:
    """Parts of a model that run on fused kernels."""

    norm: bool = True
    norm_in_place: bool = True
    """Whether a norm's gradient is written over the incoming one, which a norm before a sum cannot do."""
    rotary: bool = True
    """The rotary embedding."""
    mlp: bool = True
    """The product in the gated MLP."""
    experts: bool = False
    """Routed experts, as one function."""


PLAIN = FusedParts(norm=False, rotary=False, mlp=False)
"""Transformers' own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of one family; by default a decoder of text on PyTorch's own kernels."""

    kernel_packages: tuple[str, ...] = ()
    """Packages whose kernels it calls. Source: models/*/modeling_*.py: use_kernel_func_from_hub_with_fallback."""
    has_sinks: bool = False
    """Whether its attention has sinks, for which Transformers takes FlashAttention-3 of the hub whatever version is
    asked for; it has no gradients for them. Sources: models/*/modeling_*.py: _compatible_flash_implementations;
    kernels-community vllm-flash-attn3/torch-ext/vllm_flash_attn3/flash_attn_interface.py: FlashAttnVarlenFunc.backward.
    """
    takes_any_size: bool = False
    """Whether its processor is Qwen2VLImageProcessor."""
    packs_images: bool = False
    """Whether it takes positions of images for each sample of a packed row, beside those that keep samples apart.
    Source: models/*/modeling_*.py: get_rope_index, and forward of the text model, which takes four rows of positions.
    """
    trains_videos: bool = False
    """Whether it trains on videos: all families with Qwen3VLProcessor, which writes times between frames, do. Source:
    models/auto/processing_auto.py, and get_rope_index of these families, which is the same."""
    no_images: str = ""
    """Why it does not train on images. Source: models/*/processing_*.py."""
    image_package: str = ""
    """The package that its processor needs beside Pillow. Source: models/*/processing_*.py."""


_QWEN2_VL = Traits(takes_any_size=True, packs_images=True)
_QWEN3_VL = Traits(takes_any_size=True, packs_images=True, trains_videos=True)
_QWEN3_5 = Traits(kernel_packages=(FLA, CONV), takes_any_size=True, packs_images=True, trains_videos=True)

TRAITS: Mapping[str, Traits] = MappingProxyType(
    {
        **dict.fromkeys(
            ("bailing_hybrid", "glm5_next", "kimi_linear", "olmo_hybrid", "qwen3_next", "qwen4_exp"),
            Traits(kernel_packages=(FLA, CONV)),
        ),
        **dict.fromkeys(("inkling", "inkling2", "lfm2", "lfm2_moe"), Traits(kernel_packages=(CONV,))),
        **dict.fromkeys(
            (
                *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"),
                *("zamba", "zamba2"),
            ),
            Traits(kernel_packages=(MAMBA, CONV)),
        ),
        **dict.fromkeys(("flint", "gpt_oss", "granite_swa", "granitemoe_swa"), Traits(has_sinks=True)),
        **dict.fromkeys(
            ("blip-2", "idefics", "idefics2", "instructblip", "kosmos-2"),
            Traits(no_images="its processor does not say which tokens are those of an image"),
        ),
        "glm4v": Traits(packs_images=True),
        "mistral3": Traits(image_package="torchvision"),
        "mllama": Traits(no_images="its layers attend to images through a mask of tiles, which dstrain does not make"),
        "paligemma": Traits(
            no_images="it attends to questions in both directions, for which dstrain does not mark them"
        ),
        "qwen2_5_vl": _QWEN2_VL,
        "qwen2_vl": _QWEN2_VL,
        "qwen3_5": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5,
        "qwen3_vl": _QWEN3_VL,
        "qwen3_vl_moe": _QWEN3_VL,
        "smolvlm": Traits(image_package="num2words"),
    }
)
"""By `model_type` of a whole model; the sources are files of Transformers 5.23."""
_PLAIN = Traits()


def traits(model_type: str | None) -> Traits:
    """Returns the traits of a family; None: the default ones."""
    return TRAITS.get(model_type or "", _PLAIN)


def kernel_packages(model_type: str | None) -> tuple[str, ...]:
    """Returns the packages that a family calls, given by the `model_type` of a model or of its decoder.

    >>> kernel_packages("qwen3_5_text"), kernel_packages("llama")
    (('flash-linear-attention', 'causal-conv1d'), ())
    """
    return traits((model_type or "").removesuffix("_text")).kernel_packages


def require_media(family: str | None, columns: Collection[str]) -> None:
    """Raises InvalidConfig for a family that does not train on images or videos, as their columns are named.

    None: a family that is not known; the ranks know. Raises EnvironmentProblem if a package lacks.
    """
    for column in columns if family is not None else ():
        {"images": _require_images, "videos": _require_videos}[column](str(family))


def _require_images(family: str) -> None:
    if reason := traits(family).no_images:
        problem = f"{family} does not train on images: {reason}"
        raise InvalidConfig(problem, hint="See docs/data.md, Images, for the families that do.")
    require_image_package(family)


def _require_videos(family: str) -> None:
    if not traits(family).trains_videos:
        able = sorted(name for name, row in TRAITS.items() if row.trains_videos)
        raise InvalidConfig(
            f"{family} does not train on videos; {', '.join(able)} do",
            hint="Name a model of these families, or write a few frames of each video as images.",
        )


def require_image_package(family: str) -> None:
    """Raises EnvironmentProblem if a package that the family's processor needs is missing."""
    package = traits(family).image_package
    if package and find_spec(package) is None:
        raise not_installed(f"the processor of {family} needs", package, install=f"pip install {package}")


VISION = frozenset({"visual", "vision_tower", "vision_model", "audio_tower"})
"""Module names of the tower in Transformers' vision-language models; some have a tower for sound beside it, of which
nothing is asked."""
ALIGNER = frozenset(
    {"merger", "deepstack_merger_list", "multi_modal_projector", "aligner", "connector", "image_newline"}
)
"""Names of what joins tower and language model; in the models of Qwen and GLM it is a part of the tower's module."""


class Part(StrEnum):
    """A part of a vision-language model."""

    TOWER = "vision tower"
    ALIGNER = "multi-modal projector"
    LANGUAGE_MODEL = "language model"


FROZEN = frozenset({Part.TOWER, Part.ALIGNER})
"""The parts that do not train unless a job says so."""


def has_tower(config: Any) -> bool:
    """Returns whether a configuration of Transformers describes a vision-language model."""
    return hasattr(config, "vision_config")


def is_vision(name: str) -> bool:
    """Returns whether a module or parameter belongs to a vision tower, or to an aligner within it."""
    return not VISION.isdisjoint(name.split("."))


def part_of(name: str) -> Part:
    """Returns the part to which a parameter belongs.

    >>> part_of("model.visual.merger.norm.weight").value, part_of("model.visual.blocks.0.norm1.weight").value
    ('multi-modal projector', 'vision tower')
    """
    if not ALIGNER.isdisjoint(name.split(".")):
        return Part.ALIGNER
    return Part.TOWER if is_vision(name) else Part.LANGUAGE_MODEL
