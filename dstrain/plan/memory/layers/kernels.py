"""Parts of a model that run on fused kernels, as Liger replaces them in each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedParts:
    """Parts that run on fused kernels."""

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

_DENSE = FusedParts()
_SPARSE = FusedParts(experts=True)
_LATENT = FusedParts(rotary=False, experts=True)
_GEMMA = FusedParts(norm_in_place=False)

LIGER: Mapping[str, FusedParts] = MappingProxyType(
    {
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "gemma3": _GEMMA,
        "gemma3_text": _GEMMA,
        "glm4": FusedParts(norm_in_place=False, rotary=False),
        "granite": _DENSE,
        "llama": _DENSE,
        "ministral": _DENSE,
        "mistral": _DENSE,
        "mixtral": _SPARSE,
        "phi3": _DENSE,
        "qwen2": _DENSE,
        "qwen3": _DENSE,
        "qwen3_moe": _SPARSE,
        "smollm3": _DENSE,
    }
)
"""Parts that Liger replaces by default, as ranks do, except for the loss; jobs with other families are refused.
Source: liger-kernel 0.8.5 transformers/monkey_patch.py: apply_liger_kernel_to_…. It has kernels for Qwen3-VL too, and
cannot load them: transformers/model/output_classes.py asks for a class that Transformers 5.23 does not have.

>>> "qwen2_moe" in LIGER, "glm" in LIGER
(False, False)
"""


def fused_parts(model_type: str, *, liger: bool, otherwise: FusedParts) -> FusedParts:
    """Returns the parts of a family that run on fused kernels, with or without Liger."""
    return LIGER.get(model_type, PLAIN) if liger else otherwise
