"""Opens audios: files with sound, or their content in rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data import containers, media
from dstrain.facts.data.media_kinds import AUDIO

INSTALL = "pip install 'dstrain[audios]'"
SHORTEST_S = 0.1
"""Seconds of an audio at least: Qwen2-Audio makes two tokens of it, and counts on two that follow each other.

Source: transformers 5.23 models/qwen2_audio/modeling_qwen2_audio.py: legacy_processing."""
_CONTAINER_UNIT_S = 1e-6
"""Source: PyAV 18 container/core.pyx: Container.duration, in AV_TIME_BASE."""
_ANY_RATE = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """An audio, decoded."""

    samples: Any
    """The mean of its channels, in -1…1: (samples,), float32."""
    rate: int
    """Samples per second."""
    is_cut: bool
    """Whether the file goes on."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.rate


def opened(audio: str, rate: int, max_s: float | None = None) -> Sound:
    """Returns an audio, resampled to `rate` samples per second by FFmpeg, of which the first `max_s` seconds are kept.

    Raises InvalidConfig if it is broken or shorter than `SHORTEST_S`, EnvironmentProblem without PyAV.
    """
    require_packages()
    import av  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    name, most = media.name_of(audio, AUDIO.noun), None if max_s is None else round(max_s * rate)
    parts: list[Any] = []
    length = 0
    with _readable(audio) as (container, stream):
        resampler = av.AudioResampler(format="fltp", rate=rate)
        for frame in chain(container.decode(stream), [None]):
            for made in resampler.resample(frame):
                parts.append(made.to_ndarray().mean(axis=0, dtype=np.float32))
                length += len(parts[-1])
            if most is not None and length > most:
                break
    if length < SHORTEST_S * rate:
        hint = f"Leave it out: an audio has {SHORTEST_S:g} seconds at least."
        raise InvalidConfig(f'audio "{name}" has {length / rate:g} seconds of sound', hint=hint)
    samples = np.concatenate(parts)[:most]
    if not np.isfinite(samples).all():
        raise InvalidConfig(f'audio "{name}" has samples that are no numbers', hint=containers.again(AUDIO))
    return Sound(samples=samples, rate=rate, is_cut=length > len(samples))


def seconds_of(audio: str) -> float:
    """Returns how long an audio is by its header, or else decoded. Raises InvalidConfig if it is broken."""
    require_packages()
    with _readable(audio) as (container, stream):
        for length, unit in ((stream.duration, stream.time_base), (container.duration, _CONTAINER_UNIT_S)):
            if length is not None and unit is not None:
                return float(length * unit)
    return opened(audio, _ANY_RATE).seconds


def _readable(audio: str) -> AbstractContextManager[tuple[Any, Any]]:
    return containers.readable(audio, AUDIO, holds="sound")


def require_packages() -> None:
    """Raises EnvironmentProblem without what audios need."""
    containers.require(AUDIO, ("av",), INSTALL)
