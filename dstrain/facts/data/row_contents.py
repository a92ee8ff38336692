"""Contents of training rows, as far as the speed of a step depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from dstrain.records import type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContents:
    """Contents of training rows."""

    __pydantic_config__ = type_config

    sample_tokens: Annotated[float, Ge(1)]
    """Mean tokens of a sample."""
    attended_tokens: Annotated[float, Ge(1)]
    """Mean tokens of the sample that a token is in: squared lengths over lengths. Attention costs as much as that."""
    target_share: Annotated[float, Ge(0), Le(1)]
    """Share of tokens with a label, 0…1."""


def seen_samples(seq_len: int, image_patches: int, patches_per_token: int, *, is_packed: bool) -> int:
    """Returns the samples whose images a row holds at most: one, in packed rows as many as fill it without any text.

    `image_patches`: patches of all images of a sample.

    >>> seen_samples(4096, 1024, 4, is_packed=True)
    16
    """
    return max(1, seq_len * patches_per_token // image_patches) if is_packed and image_patches else 1
