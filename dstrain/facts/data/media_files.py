"""Reads images and videos: files, or their content in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dstrain.errors import InvalidConfig, not_installed
from dstrain.facts.data import media
from dstrain.facts.data.media import Files


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
        raise InvalidConfig(f'video "{media.name_of(video[0], "video")}" has {what}', hint=_WHOLE)
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
            problem = f'frames "{media.name_of(files[0])}" and "{media.name_of(file)}" have {sizes} pixels'
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
    name = media.name_of(file, "video")
    return InvalidConfig(f'video "{name}" ends after {number:,} of at least {expected:,} frames', hint=_WHOLE)


@contextmanager
def _readable(file: str) -> Iterator[tuple[Any, Any]]:
    """Yields the container and its first stream of frames. Raises InvalidConfig in place of PyAV's errors."""
    require_packages()
    import av  # type: ignore[import-not-found, unused-ignore]

    name = media.name_of(file, "video")
    try:
        with av.open(media.stream_of(file)) as container:
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
