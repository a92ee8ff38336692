"""Opens images: files, or their content in rows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import media

INSTALL = "pip install 'dstrain[images]'"


def opened(image: str) -> Any:
    """Returns an image as Pillow's, in RGB and decoded. Raises InvalidConfig if it is broken."""
    require_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    file: Any = image
    try:
        file = media.stream_of(image)
        with Image.open(file) as read:
            return ImageOps.exif_transpose(read).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is in no format that Pillow reads" if is_unknown else str(error).replace(repr(file), "it")
        raise InvalidConfig(f'image "{media.name_of(image)}" cannot be read: {reason}') from None


def require_pillow() -> None:
    """Raises EnvironmentProblem without Pillow."""
    if find_spec("PIL") is None:
        raise EnvironmentProblem("images need Pillow, which is not installed", hint=INSTALL)
