"""Finds and reads the images and videos of a sample: in a column, or in parts of turns, each with a mark in the text.

Each is a path, or its content as a data URL: `data:image/png;base64,…`. A video may be the files of its frames.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from dstrain import units
from dstrain.errors import InvalidConfig, not_installed
from dstrain.facts.data.columns import IMAGE, KINDS, Kind, is_given, shown

Files = tuple[str, ...]
"""The file of an image or a video, or the files of the frames of a video."""


_MARKS = re.compile(rf"(?<!`)<({'|'.join(kind.noun for kind in KINDS)})>(?!`)(?!.*</\1>)", re.DOTALL)
"""Marks; between backticks or with `</image>` it is HTML."""
_CONTENT = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[^;,]*)*;base64,", re.IGNORECASE)
"""The beginning of a data URL. Source: RFC 2397."""
_MOST_BYTES = 20 * 2**20
"""Bytes of a file in a row; OpenAI's interface limits an image to 20 MB."""
_LONGEST_PATH = 4096
"""Characters. Source: Linux, PATH_MAX."""


def kind_of(part: Any) -> Kind | None:
    """Returns the kind of a part of a turn, or None; its other keys are not looked at."""
    name = part.get("type") if isinstance(part, Mapping) else None
    return next((kind for kind in KINDS if name in kind.types), None)


def require_plain(part: Mapping[str, Any], kind: Kind, place: str) -> None:
    """Raises InvalidConfig for a part with settings or a text of its own."""
    read = {"type", "detail", *kind.values}
    others = [name for name, value in part.items() if name not in read and is_given(value)]
    if others:
        raise InvalidConfig(
            f"{place} has {kind.article} {kind.noun} with {', '.join(others)}, which is not supported",
            hint=f"Remove them: {kind.limits} of the job hold for every {kind.noun}; a text is a part of its own.",
        )


def of_parts(parts: Any, place: str) -> dict[str, list[Files | None]]:
    """Returns the files of the parts of a turn by the column of their kind; None for one that is in the column."""
    found: dict[str, list[Files | None]] = {}
    for part in parts if isinstance(parts, list) else ():
        if (kind := kind_of(part)) is not None:
            found.setdefault(kind.columns[0], []).append(_of_part(part, kind, place))
    return found


def _of_part(part: Mapping[str, Any], kind: Kind, place: str) -> Files | None:
    values = [part[name] for name in kind.values if is_given(part.get(name))]
    if not values:
        return None
    value = values[0]
    return _files(value.get("url", value) if isinstance(value, Mapping) else value, kind, f"{place}: {kind.noun}")


def split(text: str) -> list[str]:
    """Returns the text before, between and after the marks, and between these the nouns of the marks.

    >>> split("Compare <image> and <video>."), split("the tag `<image>`")
    (['Compare ', 'image', ' and ', 'video', '.'], ['the tag `<image>`'])
    """
    return _MARKS.split(text)


def named_in(row: Mapping[str, Any]) -> list[str]:
    """Returns the first columns of the kinds that a row has, in columns or in parts of turns, without a look at files.

    >>> named_in({"image": "a.png"}), named_in({"messages": [{"content": [{"type": "video", "video": "a.mp4"}]}]})
    (['images'], ['videos'])
    """
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, Mapping)]
    contents = [turn.get("content") for turn in turns]
    in_turns = [kind_of(part) for content in contents if isinstance(content, list) for part in content]
    given = [kind for kind in KINDS if kind in in_turns or any(is_given(row.get(name)) for name in kind.columns)]
    return [kind.columns[0] for kind in given]


def without_marks(text: str, kinds: Collection[Kind] = KINDS) -> str:
    """Returns a text without the marks of some kinds.

    >>> without_marks("<image>a <video>b", [IMAGE])
    'a <video>b'
    """
    nouns = {kind.noun for kind in kinds}
    return _MARKS.sub(lambda mark: "" if mark[1] in nouns else mark[0], text)


def attach(
    row: Mapping[str, Any], messages: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, tuple[Files, ...]]]:
    """Returns the messages with a mark for each image and video, and these by the first column of their kind.

    `messages` are from `turns.parse`. Media of a column without any mark stand before the first question, as TRL
    and ms-swift have it: images, then videos. Raises InvalidConfig unless there is one mark for each.
    """
    plain, found = list(messages), {}
    for kind in reversed(KINDS):
        plain, found[kind.columns[0]] = _attached(row, plain, kind)
    return plain, found


def single(files: Sequence[Files]) -> Files:
    """Returns the files of images, each of which is one."""
    return tuple(file for (file,) in files)


def _attached(
    row: Mapping[str, Any], messages: list[dict[str, Any]], kind: Kind
) -> tuple[list[dict[str, Any]], tuple[Files, ...]]:
    key = kind.columns[0]
    in_parts = [files for message in messages for files in message.get(key, ())]
    in_column = _of_column(row, kind)
    if not in_parts and not in_column:
        return messages, ()
    plain = [{name: value for name, value in message.items() if name != key} for message in messages]
    given = [files for files in in_parts if files is not None]
    if given and (in_column or len(given) < len(in_parts)):
        raise InvalidConfig(f"some {key} are parts of turns, others are not", hint=_forms(kind))
    found = tuple(given or in_column)
    # every other part of a split text is a mark
    marks = [split(message["content"])[1::2].count(kind.noun) for message in plain]
    for number, (message, num_marks) in enumerate(zip(plain, marks, strict=True), start=1):
        if message["role"] == "assistant" and num_marks:
            what = f"{kind.article} {kind.noun}"
            raise InvalidConfig(f"turn {number}, of the assistant: has {what}, which no model here can write")
    if found and not sum(marks):
        first = next((i for i, message in enumerate(plain) if message["role"] == "user"), None)
        if first is None:
            raise InvalidConfig(f"{units.counted(len(found), kind.noun)} but no question to put them before")
        plain[first]["content"] = kind.mark * len(found) + plain[first]["content"]
    elif sum(marks) != len(found):
        raise InvalidConfig(
            f"{units.counted(sum(marks), 'mark')} {kind.mark}, but {units.counted(len(found), kind.noun)}",
            hint=f"Write one {kind.mark} for each {kind.noun}; without any, {key} stand before the first question.",
        )
    return plain, found


def _of_column(row: Mapping[str, Any], kind: Kind) -> list[Files]:
    """Returns the files in the column of a kind."""
    named = [name for name in kind.columns if is_given(row.get(name))]
    if not named:
        return []
    if len(named) > 1:
        raise InvalidConfig(f"{' and '.join(named)} are both given", hint="Keep one of the two columns.")
    values = row[named[0]]
    return [_files(value, kind, f'"{named[0]}"') for value in (values if isinstance(values, list) else [values])]


def _files(given: Any, kind: Kind, place: str) -> Files:
    """Returns the file of an image or a video, or the files of its frames. Raises InvalidConfig for a single frame."""
    if not kind.has_frames or not isinstance(given, list):
        return (_file(given, kind, place),)
    if len(given) < 2:
        hint = "Write a video as its file, or as the files of two or more frames; a picture is an image."
        raise InvalidConfig(f"{place} is {shown(given)}, a list of {units.counted(len(given), 'frame')}", hint=hint)
    return tuple(_file(frame, IMAGE, place) for frame in given)


def _file(given: Any, kind: Kind, place: str) -> str:
    """Returns a path or a data URL, also of bytes, and of the hub's `{"bytes": …, "path": …}`.

    Raises InvalidConfig for addresses on the web, and for large contents.
    """
    value = given
    if isinstance(given, Mapping):
        value = given["bytes"] if isinstance(given.get("bytes"), bytes) else given.get("path")
    if isinstance(value, bytes):
        value = f"data:;base64,{b64encode(value).decode()}"
    one = f"{kind.article} {kind.noun}"
    files = f"Write {kind.noun}s to files, and their paths here."
    urls = f"The content of {one} is a data URL: data:{kind.content};base64,…"
    if not isinstance(value, str) or not value:
        raise InvalidConfig(f"{place} is {shown(given)}; it must be a path, bytes or a data URL", hint=files)
    if value.startswith(("http://", "https://")):
        raise InvalidConfig(
            f"{place} is {shown(value)}, not a file", hint=f"Download {kind.noun}s, and write their paths."
        )
    if value.startswith("data:"):
        if not _CONTENT.match(value):
            raise InvalidConfig(f"{place} is {shown(value)}, a data URL without base64", hint=urls)
        # base64 has four characters for three bytes
        size, most = (units.format_bytes(count) for count in (len(value) * 3 // 4, _MOST_BYTES))
        if len(value) * 3 // 4 > _MOST_BYTES:
            raise InvalidConfig(f"{place} has {size}; {one} in a row has {most} at most", hint=files)
        return value
    if len(value) > _LONGEST_PATH:
        raise InvalidConfig(f"{place} is {shown(value)}, too long for a path", hint=urls)
    return value.removeprefix("file://")


def _forms(kind: Kind) -> str:
    noun = kind.noun
    return f'Write the paths in a column "{noun}s", or as parts: {{"type": "{noun}", "{noun}": PATH}}.'


def name_of(file: str, noun: str = "image") -> str:
    """Returns the name of a file for messages: its path, or the type of its content.

    >>> name_of("cats/a.png"), name_of("data:image/png;base64,iVBORw0KGgo=")
    ('cats/a.png', 'PNG in the row')
    """
    content = _CONTENT.match(file)
    if not content:
        return file
    return f"{content[1].rpartition('/')[2].upper() if content[1] else noun} in the row"


def stream_of(file: str) -> Any:
    """Returns the input of a decoder: a path, or the content of a data URL as a stream of bytes.

    Raises ValueError if its base64 is broken.
    """
    content = _CONTENT.match(file)
    return BytesIO(b64decode(file[content.end() :])) if content else file


def located(files: Sequence[str], folder: Path | None, noun: str) -> Files:
    """Returns the files, which exist; relative paths are relative to `folder`, by default the current one.

    Raises InvalidConfig for a file that does not exist.
    """
    found = tuple(path if _CONTENT.match(path) else str((folder or Path()) / Path(path).expanduser()) for path in files)
    for path, file in zip(files, found, strict=True):
        if not _CONTENT.match(file) and not Path(file).is_file():
            where = "" if file == path else f" ({file})"
            raise InvalidConfig(f'{noun} "{path}" does not exist{where}', hint="Paths are relative to the data file.")
    return found


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
        file = stream_of(image)
        with Image.open(file) as read:
            return of(read)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is in no format that Pillow reads" if is_unknown else str(error).replace(repr(file), "it")
        raise InvalidConfig(f'image "{name_of(image)}" cannot be read: {reason}') from None


def require_pillow() -> None:
    """Raises EnvironmentProblem without Pillow."""
    if find_spec("PIL") is None:
        raise not_installed("images need", "Pillow", install="pip install 'dstrain[images]'")


_PACKAGES = ("torchvision", "av")
"""The processors of videos, and PyAV, which decodes them."""
_WHOLE = "Copy it again, or write it anew: ffmpeg -i OLD.mp4 NEW.mp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a video."""

    num_frames: int
    fps: float | None
    """Frames per second; None of a list of frames."""
    width: int
    """Of a frame, in pixels."""
    height: int


def header_of(video: Files) -> Header:
    """Returns the header of a video, with the size of its first frame; frames that a file does not count are
    decoded to count them.

    Raises InvalidConfig if it cannot be read.
    """
    if len(video) > 1:
        first = opened(video[0])
        return Header(num_frames=len(video), fps=None, width=first.width, height=first.height)
    with _readable(video[0]) as (container, stream):
        rate, decoded = stream.average_rate or stream.guessed_rate, container.decode(stream)
        first = next(decoded, None)
        num_frames = stream.frames or 1 + sum(1 for _ in decoded)
    if not rate or first is None:
        what = "no frames" if rate else "no frame rate"
        raise InvalidConfig(f'video "{name_of(video[0], "video")}" has {what}', hint=_WHOLE)
    image = _upright(first)
    return Header(num_frames=num_frames, fps=float(rate), width=image.width, height=image.height)


def frames_of(video: Files, indices: Iterable[int]) -> Iterator[Any]:
    """Yields the frames of these numbers, ascending from 0, as Pillow's images in RGB.

    Raises InvalidConfig if one cannot be read, if a file ends before it, or if the frames have several sizes.
    """
    wanted = list(indices)
    if len(video) > 1:
        yield from _frames_of_files([video[index] for index in wanted])
        return
    chosen, number = set(wanted), 0
    with _readable(video[0]) as (container, stream):
        for number, frame in enumerate(container.decode(stream), start=1):
            if number - 1 in chosen:
                yield _upright(frame)
            if number > wanted[-1]:
                break
    if number <= wanted[-1]:
        raise _cut(video[0], number, wanted[-1] + 1)


def _frames_of_files(files: Sequence[str]) -> Iterator[Any]:
    first = None
    for file in files:
        frame = opened(file)
        first = first or frame
        if frame.size != first.size:
            sizes = " and ".join(f"{image.width} × {image.height}" for image in (first, frame))
            problem = f'frames "{name_of(files[0])}" and "{name_of(file)}" have {sizes} pixels'
            raise InvalidConfig(problem, hint="Write the frames of a video in one size.")
        yield frame


def require_whole(video: Files) -> None:
    """Raises InvalidConfig if a video is broken, after reading all of its frames."""
    if len(video) > 1:
        for _ in _frames_of_files(video):
            pass
        return
    header = header_of(video)
    with _readable(video[0]) as (container, stream):
        number = sum(1 for _ in container.decode(stream))
    if number < header.num_frames:
        raise _cut(video[0], number, header.num_frames)


def _upright(frame: Any) -> Any:
    """Returns a frame as Pillow's image, turned as its file says, which phones hold upright."""
    return frame.to_image().rotate(frame.rotation, expand=True)


def _cut(file: str, number: int, expected: int) -> InvalidConfig:
    name = name_of(file, "video")
    return InvalidConfig(f'video "{name}" ends after {number:,} of at least {expected:,} frames', hint=_WHOLE)


@contextmanager
def _readable(file: str) -> Iterator[tuple[Any, Any]]:
    """Yields the container and its first stream of frames. Raises InvalidConfig in place of PyAV's errors."""
    require_packages()
    import av  # type: ignore[import-not-found, unused-ignore]

    name = name_of(file, "video")
    try:
        with av.open(stream_of(file)) as container:
            if not container.streams.video:
                raise InvalidConfig(f'video "{name}" has no frames, only other streams')
            yield container, container.streams.video[0]
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(f'video "{name}" cannot be read: {reason}', hint=_WHOLE) from None


def require_packages() -> None:
    """Raises EnvironmentProblem without what videos need."""
    require_pillow()
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise not_installed("videos need", *missing, install="pip install 'dstrain[videos]'")
