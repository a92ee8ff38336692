"""The packages whose kernels Transformers calls for linear attention, convolutions and state spaces, by family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FLA, CONV, MAMBA = "flash-linear-attention", "causal-conv1d", "mamba-ssm"
DISTRIBUTIONS = (FLA, CONV, MAMBA)
"""All of them, as pip names them."""

LIGER_RELEASES = ">=0.8.5,<0.9"
"""Releases of liger-kernel that replace the parts that are planned (`dstrain/plan/memory/layers/kernels.py`)."""

_BY_PACKAGES: Mapping[tuple[str, ...], str] = MappingProxyType(
    {
        (FLA, CONV): "bailing_hybrid glm5_next kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next qwen4_exp",
        (CONV,): "inkling inkling2 lfm2 lfm2_moe",
        (MAMBA, CONV): ("bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h zamba zamba2"),
    }
)
"""Packages → the families that call them, without `_text`. Source: Transformers 5.23 models/*/modeling_*.py:
use_kernel_func_from_hub_with_fallback."""

_FAMILIES = {family: packages for packages, names in _BY_PACKAGES.items() for family in names.split()}

COST = (
    "a step of Qwen3.5-9B took 1.22 in place of 0.70 s on 8 B200 (transformers#48718),"
    " and 12 of its layers needed 14.2 in place of 12.4 GiB of an H200"
)
"""Cost of training without flash-linear-attention."""


def kernel_packages(model_type: str) -> tuple[str, ...]:
    """Returns the packages that a family calls; none for most.

    >>> kernel_packages("qwen3_5_text"), kernel_packages("llama")
    (('flash-linear-attention', 'causal-conv1d'), ())
    """
    return _FAMILIES.get(model_type.removesuffix("_text"), ())
