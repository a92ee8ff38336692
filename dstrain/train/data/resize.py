"""Sizes of images and frames before the processor of a model sees them."""

from __future__ import annotations

import math
from typing import Any

BLANK_SIDE = 32
"""Side of a blank image, in pixels."""


def shrunk(image: Any, max_pixels: int | None) -> Any:
    """Returns an image of Pillow with at most so many pixels; None: as it is."""
    pixels = image.width * image.height
    if max_pixels is None or pixels <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / pixels)
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
