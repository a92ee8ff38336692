"""Finds the images of a sample: in a column, or in parts of turns, with a mark in the text for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data.row_values import is_given, shown

COLUMNS = ("images", "image")
"""Columns with the path of an image, or a list of paths. Source: LLaMA-Factory, ms-swift, TRL (`images`)."""
MARK = "<image>"
"""The place of an image in a text."""
INSTALL = "pip install 'dstrain[images]'"

_MARKS = re.compile(r"(?<!`)<image>(?!`)(?!.*</image>)", re.DOTALL)
"""Marks; between backticks or with `</image>` it is HTML."""
_KINDS = ("image", "image_url", "input_image")
"""Types of the parts of a turn that are images. Source: Transformers and Qwen (`image`), OpenAI (the others)."""
_VALUES = ("image", "image_url", "url", "path")
_READ = {"type", "detail", *_VALUES}
_FORMS = 'Write the paths of images in a column "images", or as parts: {"type": "image", "image": PATH}.'


def is_image(part: Any) -> bool:
    """Returns whether a part of a turn is an image and nothing else."""
    return (
        isinstance(part, Mapping)
        and part.get("type") in _KINDS
        and all(key in _READ or not is_given(value) for key, value in part.items())
    )


def of_parts(parts: Any, place: str) -> list[str | None]:
    """Returns the paths of the images among the parts of a turn; None for one whose path is in a column."""
    images = filter(is_image, parts) if isinstance(parts, list) else ()
    return [_of_part(part, place) for part in images]


def _of_part(part: Mapping[str, Any], place: str) -> str | None:
    values = [part[name] for name in _VALUES if is_given(part.get(name))]
    if not values:
        return None
    value = values[0].get("url") if isinstance(values[0], Mapping) else values[0]
    return _path(value, f"{place}: image")


def split(text: str) -> list[str]:
    """Returns the text before, between and after the marks of images.

    >>> split("Compare <image> and <image>."), split("the tag `<image>`")
    (['Compare ', ' and ', '.'], ['the tag `<image>`'])
    """
    return _MARKS.split(text)


def attach(row: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the messages with a mark for each image, and the paths of the images in order.

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
    """Returns the paths in the column of images."""
    named = [name for name in COLUMNS if is_given(row.get(name))]
    if not named:
        return []
    if len(named) > 1:
        raise InvalidConfig(f"{' and '.join(named)} are both given", hint="Keep one of the two columns.")
    values = row[named[0]]
    return [_path(value, f'"{named[0]}"') for value in (values if isinstance(values, list) else [values])]


def _path(value: Any, place: str) -> str:
    """Returns the path of an image. Raises InvalidConfig for its content, or an address on the web."""
    if not isinstance(value, str) or not value:
        problem = "holds the content of an image" if isinstance(value, Mapping) else f"is {shown(value)}"
        raise InvalidConfig(
            f"{place} {problem}; it must be a path", hint="Write images to files, and their paths here."
        )
    if value.startswith(("http://", "https://", "data:")):
        raise InvalidConfig(f"{place} is {shown(value)}, not a file", hint="Download images, and write their paths.")
    return value.removeprefix("file://")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def located(paths: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """Returns paths of existing files; relative ones are relative to `folder`, by default the current one.

    Raises InvalidConfig for a file that does not exist.
    """
    files = tuple(str((folder or Path()) / Path(path).expanduser()) for path in paths)
    for path, file in zip(paths, files, strict=True):
        if not Path(file).is_file():
            where = "" if file == path else f" ({file})"
            raise InvalidConfig(f'image "{path}" does not exist{where}', hint="Paths are relative to the data file.")
    return files


def opened(path: str) -> Any:
    """Returns an image as Pillow's, in RGB and decoded. Raises InvalidConfig if it is broken."""
    require_pillow()
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).replace(f"'{path}'", "it")
        raise InvalidConfig(f'image "{path}" cannot be read: {reason}') from None


def require_pillow() -> None:
    """Raises EnvironmentProblem without Pillow."""
    if find_spec("PIL") is None:
        raise EnvironmentProblem("images need Pillow, which is not installed", hint=INSTALL)
