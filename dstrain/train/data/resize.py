"""Sizes of images and frames before the processor of a model sees them."""

from __future__ import annotations

import math
from typing import Any

BLANK_SIDE = 32
"""Side of a blank image, in pixels."""


def resized(image: Any, max_pixels: int | None, min_pixels: int | None = None) -> Any:
    """Returns an image of Pillow with at most and at least so many pixels, as its sides allow; None: as it is.

    Source: LLaMA-Factory 0.9 data/mm_plugin.py: MMPluginMixin._preprocess_image.
    """
    for limit, is_beyond in ((max_pixels, int.__gt__), (min_pixels, int.__lt__)):
        pixels = image.width * image.height
        if limit is not None and is_beyond(pixels, limit):
            scale = math.sqrt(limit / pixels)
            image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    return image
