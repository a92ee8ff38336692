"""Finds the images of a sample: in a column, or in parts of turns, with a mark in the text for each.

An image is a path, or its content as a data URL: `data:image/png;base64,…`.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from dstrain import units
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data.row_values import is_given, shown

COLUMNS = ("images", "image")
"""Columns with an image, or a list of images. Source: LLaMA-Factory, ms-swift, TRL (`images`)."""
MARK = "<image>"
"""The place of an image in a text."""
INSTALL = "pip install 'dstrain[images]'"

_MARKS = re.compile(r"(?<!`)<image>(?!`)(?!.*</image>)", re.DOTALL)
"""Marks; between backticks or with `</image>` it is HTML."""
_KINDS = ("image", "image_url", "input_image")
"""Types of the parts of a turn that are images. Source: Transformers and Qwen (`image`), OpenAI (the others)."""
_VALUES = ("image", "image_url", "url", "path")
_READ = {"type", "detail", *_VALUES}
_CONTENT = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[^;,]*)*;base64,", re.IGNORECASE)
"""The beginning of a data URL. Source: RFC 2397."""
_MOST_BYTES = 20 * 2**20
"""Bytes of an image in a row; that of OpenAI's interface is 20 MB."""
_LONGEST_PATH = 4096
"""Characters. Source: Linux, PATH_MAX."""
_FILES = "Write images to files, and their paths here."
_URLS = "The content of an image is a data URL: data:image/png;base64,…"
_FORMS = 'Write the paths of images in a column "images", or as parts: {"type": "image", "image": PATH}.'


def is_image(part: Any) -> bool:
    """Returns whether a part of a turn is an image and nothing else."""
    return (
        isinstance(part, Mapping)
        and part.get("type") in _KINDS
        and all(key in _READ or not is_given(value) for key, value in part.items())
    )


def of_parts(parts: Any, place: str) -> list[str | None]:
    """Returns the images among the parts of a turn; None for one that is in a column."""
    images = filter(is_image, parts) if isinstance(parts, list) else ()
    return [_of_part(part, place) for part in images]


def _of_part(part: Mapping[str, Any], place: str) -> str | None:
    values = [part[name] for name in _VALUES if is_given(part.get(name))]
    if not values:
        return None
    value = values[0]
    return _image(value.get("url", value) if isinstance(value, Mapping) else value, f"{place}: image")


def split(text: str) -> list[str]:
    """Returns the text before, between and after the marks of images.

    >>> split("Compare <image> and <image>."), split("the tag `<image>`")
    (['Compare ', ' and ', '.'], ['the tag `<image>`'])
    """
    return _MARKS.split(text)


def attach(row: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the messages with a mark for each image, and the images in order.

    `messages` are those of `turns.parse`. Images of a column without any mark stand before the first question, as TRL
    and ms-swift have it. Raises InvalidConfig unless there is one mark for each image.
    """
    in_parts = [image for message in messages for image in message.get("images", ())]
    in_column = _of_column(row)
    if not in_parts and not in_column:
        return list(messages), ()
    plain = [{key: value for key, value in message.items() if key != "images"} for message in messages]
    given = [image for image in in_parts if image is not None]
    if given and (in_column or len(given) < len(in_parts)):
        raise InvalidConfig("some images are parts of turns, others are not", hint=_FORMS)
    paths = tuple(given or in_column)
    for number, message in enumerate(plain, start=1):
        if message["role"] == "assistant" and len(split(message["content"])) > 1:
            raise InvalidConfig(f"turn {number}, of the assistant: has an image, which no model here can write")
    num_marks = sum(len(split(message["content"])) - 1 for message in plain)
    if paths and not num_marks:
        first = next((i for i, message in enumerate(plain) if message["role"] == "user"), None)
        if first is None:
            raise InvalidConfig(f"{_count(len(paths), 'image')} but no question to put them before")
        plain[first]["content"] = MARK * len(paths) + plain[first]["content"]
    elif num_marks != len(paths):
        raise InvalidConfig(
            f"{_count(num_marks, 'mark')} {MARK}, but {_count(len(paths), 'image')}",
            hint=f"Write one {MARK} for each image; without any, images stand before the first question.",
        )
    return plain, paths


def _of_column(row: Mapping[str, Any]) -> list[str]:
    """Returns the images in their column."""
    named = [name for name in COLUMNS if is_given(row.get(name))]
    if not named:
        return []
    if len(named) > 1:
        raise InvalidConfig(f"{' and '.join(named)} are both given", hint="Keep one of the two columns.")
    values = row[named[0]]
    return [_image(value, f'"{named[0]}"') for value in (values if isinstance(values, list) else [values])]


def _image(given: Any, place: str) -> str:
    """Returns a path or a data URL, also of bytes, and of the hub's `{"bytes": …, "path": …}`.

    Raises InvalidConfig for addresses on the web, and for large contents.
    """
    value = given
    if isinstance(given, Mapping):
        value = given["bytes"] if isinstance(given.get("bytes"), bytes) else given.get("path")
    if isinstance(value, bytes):
        value = f"data:;base64,{b64encode(value).decode()}"
    if not isinstance(value, str) or not value:
        raise InvalidConfig(f"{place} is {shown(given)}; it must be a path, bytes or a data URL", hint=_FILES)
    if value.startswith(("http://", "https://")):
        raise InvalidConfig(f"{place} is {shown(value)}, not a file", hint="Download images, and write their paths.")
    if value.startswith("data:"):
        return _content(value, place)
    if len(value) > _LONGEST_PATH:
        raise InvalidConfig(f"{place} is {shown(value)}, too long for a path", hint=_URLS)
    return value.removeprefix("file://")


def _content(url: str, place: str) -> str:
    """Returns a data URL. Raises InvalidConfig for one that has no base64, or too much."""
    if not _CONTENT.match(url):
        raise InvalidConfig(f"{place} is {shown(url)}, a data URL without base64", hint=_URLS)
    size, most = (units.format_bytes(count) for count in (len(url) * 3 // 4, _MOST_BYTES))
    if len(url) * 3 // 4 > _MOST_BYTES:
        raise InvalidConfig(f"{place} has {size}; an image in a row has {most} at most", hint=_FILES)
    return url


def name_of(image: str) -> str:
    """Returns the name of an image for messages: its path, or the type of its content.

    >>> name_of("cats/a.png"), name_of("data:image/png;base64,iVBORw0KGgo=")
    ('cats/a.png', 'PNG in the row')
    """
    content = _CONTENT.match(image)
    if not content:
        return image
    return f"{content[1].rpartition('/')[2].upper() if content[1] else 'image'} in the row"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def located(paths: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """Returns images, whose files exist; relative paths are relative to `folder`, by default the current one.

    Raises InvalidConfig for a file that does not exist.
    """
    files = tuple(path if _CONTENT.match(path) else str((folder or Path()) / Path(path).expanduser()) for path in paths)
    for path, file in zip(paths, files, strict=True):
        if not _CONTENT.match(file) and not Path(file).is_file():
            where = "" if file == path else f" ({file})"
            raise InvalidConfig(f'image "{path}" does not exist{where}', hint="Paths are relative to the data file.")
    return files


def opened(image: str) -> Any:
    """Returns an image as Pillow's, in RGB and decoded. Raises InvalidConfig if it is broken."""
    require_pillow()
    from PIL import Image, ImageOps

    content = _CONTENT.match(image)
    file: Any = image
    try:
        file = BytesIO(b64decode(image[content.end() :])) if content else image
        with Image.open(file) as read:
            return ImageOps.exif_transpose(read).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).replace(repr(file), "it")
        raise InvalidConfig(f'image "{name_of(image)}" cannot be read: {reason}') from None


def require_pillow() -> None:
    """Raises EnvironmentProblem without Pillow."""
    if find_spec("PIL") is None:
        raise EnvironmentProblem("images need Pillow, which is not installed", hint=INSTALL)
