"""Opens files of video and sound with PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import media
from dstrain.facts.data.media_kinds import Kind


def again(kind: Kind) -> str:
    """Returns what to do about a broken file."""
    suffix = kind.content.rpartition("/")[2]
    return f"Copy it again, or write it anew: ffmpeg -i OLD.{suffix} NEW.{suffix}"


@contextmanager
def readable(file: str, kind: Kind, *, holds: str) -> Iterator[tuple[Any, Any]]:
    """Yields the container and its first stream of video or sound, whose name in PyAV is that of `kind`.

    `holds`: what such a stream holds. Raises InvalidConfig in place of PyAV's errors. PyAV must be installed.
    """
    import av  # type: ignore[import-not-found, unused-ignore]

    name = media.name_of(file, kind.noun)
    try:
        with av.open(media.stream_of(file)) as container:
            streams = getattr(container.streams, kind.noun)
            if not streams:
                raise InvalidConfig(f'{kind.noun} "{name}" has no {holds}, only other streams')
            yield container, streams[0]
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(f'{kind.noun} "{name}" cannot be read: {reason}', hint=again(kind)) from None


def require(kind: Kind, packages: tuple[str, ...], install: str) -> None:
    """Raises EnvironmentProblem without what files of a kind need."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        problem = f"{kind.columns[0]} need {' and '.join(missing)}, which {are} not installed"
        raise EnvironmentProblem(problem, hint=install)
