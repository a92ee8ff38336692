"""Opens images: files, or their content in rows."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import media

INSTALL = "pip install 'dstrain[images]'"


def opened(image: str) -> Any:
    """Returns an image as Pillow's, in RGB and decoded. Raises InvalidConfig if it is broken."""
    require_pillow()
    from PIL import ImageOps

    return _read(image, lambda read: ImageOps.exif_transpose(read).convert("RGB"))


def opened_size(image: str) -> tuple[int, int]:
    """Returns the width and height of an image, in pixels, by its header. Raises InvalidConfig if it is broken."""
    width, height = _read(image, lambda read: read.size)
    return width, height


def _read(image: str, of: Callable[[Any], Any]) -> Any:
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    file: Any = image
    try:
        file = media.stream_of(image)
        with Image.open(file) as read:
            return of(read)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is in no format that Pillow reads" if is_unknown else str(error).replace(repr(file), "it")
        raise InvalidConfig(f'image "{media.name_of(image)}" cannot be read: {reason}') from None


def require_pillow() -> None:
    """Raises EnvironmentProblem without Pillow."""
    if find_spec("PIL") is None:
        raise EnvironmentProblem("images need Pillow, which is not installed", hint=INSTALL)
