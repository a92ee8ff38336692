"""Counts the vision patches of images by their sizes, as the processor of a model cuts them, without the processor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dstrain.choices import Hub
from dstrain.errors import DstrainError
from dstrain.facts.data.media_files import opened_size
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model.hub_config import file_here, model_type
from dstrain.facts.model.model_files import PROCESSOR_FILES
from dstrain.facts.model.traits import traits

_LEAST, _MOST = 56 * 56, 28 * 28 * 1280
"""Pixels of an image. Source: transformers 5.23 models/qwen2_vl/image_processing_qwen2_vl.py: Qwen2VLImageProcessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eye:
    """How the processor of a model cuts images into patches."""

    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Side of the square of patches that becomes a token."""
    least: int
    """Pixels of an image at least, as it is cut."""
    most: int
    max_pixels: int | None = None
    """Pixels above which an image is made smaller first, by the job."""
    min_pixels: int | None = None

    def patches_of(self, sample: Conversation | str) -> int | None:
        """Returns the patches of all images of a sample; None if it has videos, or if one cannot be read here."""
        if isinstance(sample, str):
            return 0
        if sample.videos:
            return None
        try:
            return sum(self.of_size(*_size(image)) for image in sample.images)
        except DstrainError:
            return None

    def of_size(self, width: int, height: int) -> int:
        """Returns the patches of an image of so many pixels.

        >>> Eye(patch=16, merge=2, least=65536, most=16777216).of_size(640, 480)
        1200
        """
        for limit, is_beyond in ((self.max_pixels, int.__gt__), (self.min_pixels, int.__lt__)):
            if limit is not None and is_beyond(width * height, limit):
                scale = math.sqrt(limit / (width * height))
                width, height = max(1, int(width * scale)), max(1, int(height * scale))
        wide, high = smart_resize(width, height, factor=self.patch * self.merge, least=self.least, most=self.most)
        return wide * high // self.patch**2


def smart_resize(width: int, height: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns the sides of an image as multiples of a factor, between so many pixels.

    Source: transformers 5.23 models/qwen2_vl/image_processing_qwen2_vl.py: smart_resize.
    """
    wide, high = (round(side / factor) * factor for side in (width, height))
    if wide * high > most:
        beta = math.sqrt(width * height / most)
        wide, high = (max(factor, math.floor(side / beta / factor) * factor) for side in (width, height))
    elif wide * high < least:
        beta = math.sqrt(least / (width * height))
        wide, high = (math.ceil(side * beta / factor) * factor for side in (width, height))
    return wide, high


def eye_of(source: str, hub: Hub, *, max_pixels: int | None = None, min_pixels: int | None = None) -> Eye | None:
    """Returns how a model cuts images, given as a folder or by its id; None if its rule is not known, or not here."""
    if not traits(model_type(source, hub)).takes_any_size:
        return None
    settings: dict[str, Any] = {}
    for name in reversed(PROCESSOR_FILES[:2]):
        if (path := file_here(source, hub, name)) is not None:
            found = json.loads(path.read_text(encoding="utf-8"))
            settings |= found.get("image_processor", found)
    if not settings:
        return None
    least, most = _pixels(settings)
    patch, merge = (int(settings.get(name, default)) for name, default in (("patch_size", 14), ("merge_size", 2)))
    return Eye(patch=patch, merge=merge, least=least, most=most, max_pixels=max_pixels, min_pixels=min_pixels)


def _pixels(settings: Mapping[str, Any]) -> tuple[int, int]:
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or _LEAST
    return int(least), int(settings.get("max_pixels") or size.get("longest_edge") or _MOST)


@lru_cache(maxsize=4096)
def _size(image: str) -> tuple[int, int]:
    return opened_size(image)
