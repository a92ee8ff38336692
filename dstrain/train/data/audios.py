"""Audios as the model's own processor takes them: at its rate, and as much of each as it hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.errors import InvalidConfig
from dstrain.facts.data.audios import Sound, opened
from dstrain.facts.data.media import name_of
from dstrain.facts.data.media_kinds import AUDIO
from dstrain.facts.model.audio_towers import TRAINS_AUDIO
from dstrain.job.schema import Job

_BLANK_S = 0.5
"""Seconds of a silent audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audios:
    """Reads audios for the processor of a model."""

    extractor: Any
    """The part of a processor of Transformers that makes features of sound."""
    max_s: float | None
    """Seconds of an audio at most; None: all of it."""

    @property
    def identity(self) -> str:
        """Changes with the tokens of an audio."""
        return f"{self.max_s} {self.extractor.to_json_string()}"

    def read(self, audio: str | Sound) -> Sound:
        """Returns an audio, decoded if it is not yet. Raises InvalidConfig if it is broken."""
        return audio if isinstance(audio, Sound) else opened(audio, self.extractor.sampling_rate, self.max_s)

    def arguments(self, samples: Sequence[Sequence[str | Sound]]) -> dict[str, Any]:
        """Returns the arguments of the model's processor for the audios of samples, in order.

        Raises InvalidConfig if one is broken.
        """
        return self._arguments([self.read(audio) for sample in samples for audio in sample])

    def blank_arguments(self) -> dict[str, Any]:
        """Returns the same of a short silence."""
        rate = self.extractor.sampling_rate
        silence = np.zeros(round(_BLANK_S * rate), np.float32)
        return self._arguments([Sound(samples=silence, rate=rate, is_cut=False)])

    def _arguments(self, sounds: Sequence[Sound]) -> dict[str, Any]:
        return {"audio": [sound.samples for sound in sounds], "sampling_rate": self.extractor.sampling_rate}

    def text_of(self, audio: str) -> str:
        """Returns the name of an audio and its length, in words."""
        sound = self.read(audio)
        first = "the first " if sound.is_cut else ""
        return f"{Path(name_of(audio, AUDIO.noun)).name}: {first}{sound.seconds:.2f} seconds"


def audios_of(family: str, processor: Any, job: Job) -> Audios:
    """Returns the audios of a model's processor. Raises InvalidConfig if the job asks for more than it takes."""
    most, asked = _longest_s(family, processor), job.audio_max_seconds
    if most is not None and asked is not None and asked > most:
        raise InvalidConfig(
            f"audio_max_seconds is {asked:g}, but the processor of {job.model} takes {most:g} seconds of an audio",
            hint=f"audio_max_seconds: {most:g}, or leave it out",
        )
    return Audios(extractor=processor.feature_extractor, max_s=asked or most)


def _longest_s(family: str, processor: Any) -> float | None:
    """Returns the seconds of an audio that a processor takes, after which it drops the rest; None: all.

    Some cut an audio into windows, and drop those after the last whole one; Qwen2-Audio's has one window. Source:
    transformers 5.23 models/*/processing_*.py: _process_audio.
    """
    if TRAINS_AUDIO[family].max_s is None:
        return None
    window = processor.feature_extractor.chunk_length
    longest: float = getattr(processor, "max_audio_len", window) // window * window
    return longest
