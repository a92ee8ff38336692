"""Which of a model's parts run on fused kernels: what Liger replaces in each family, and Unsloth in any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.choices import LossKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What runs on fused kernels."""

    norm: bool = True
    norm_in_place: bool = True
    """Whether a norm's gradient is written over the incoming one, which a norm before a sum cannot do."""
    rotary: bool = True
    """The rotary embedding."""
    mlp: bool = True
    """The product in the gated MLP."""
    experts: bool = False
    """Routed experts, as one function."""
    loss: LossKernel = LossKernel.FUSED


PLAIN = Kernels(norm=False, rotary=False, mlp=False, loss=LossKernel.FULL)
"""Transformers' own code."""
UNSLOTH = Kernels(mlp=False, loss=LossKernel.FULL)
"""Unsloth's norms and rotary embedding, as fms-acceleration patches them into any model."""

_DENSE = Kernels()
_SPARSE = Kernels(experts=True)
_LATENT = Kernels(rotary=False, experts=True)
_GEMMA = Kernels(norm_in_place=False)

LIGER: Mapping[str, Kernels] = MappingProxyType(
    {
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "gemma3": _GEMMA,
        "gemma3_text": _GEMMA,
        "glm4": Kernels(norm_in_place=False, rotary=False),
        "granite": Kernels(loss=LossKernel.IN_PLACE),
        "llama": _DENSE,
        "ministral": _DENSE,
        "mistral": _DENSE,
        "mixtral": _SPARSE,
        "phi3": _DENSE,
        "qwen2": _DENSE,
        "qwen3": _DENSE,
        "qwen3_moe": _SPARSE,
        "qwen3_vl": Kernels(mlp=False),
        "qwen3_vl_moe": _SPARSE,
        "smollm3": _DENSE,
    }
)
"""What Liger replaces by default; families that are not here run as they are, with no more than a warning.
Source: liger-kernel 0.8.5 transformers/monkey_patch.py: apply_liger_kernel_to_….

>>> LIGER["granite"].loss.value, "qwen2_moe" in LIGER, "glm" in LIGER
('in-place', False, False)
"""


def kernels(model_type: str, *, liger: bool, unsloth: bool) -> Kernels:
    """Returns what runs on fused kernels."""
    if liger:
        return LIGER.get(model_type, PLAIN)
    return UNSLOTH if unsloth else PLAIN
