"""Families of models that hear: an audio tower and an aligner below a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFamily:
    """A family that trains on audio: its processor writes a token for each vector of its tower, and nothing else."""

    tokens_per_s: float
    """Tokens of a second of sound; the last token of a stretch counts as a whole one."""
    max_s: int | None
    """Seconds of an audio that the processor of its models on the hub takes; None: all."""


TRAINS_AUDIO: Mapping[str, AudioFamily] = MappingProxyType(
    {
        "qwen2_audio": AudioFamily(tokens_per_s=25, max_s=30),
        "audioflamingo3": AudioFamily(tokens_per_s=25, max_s=600),
        "musicflamingo": AudioFamily(tokens_per_s=25, max_s=1200),
        "glmasr": AudioFamily(tokens_per_s=12.5, max_s=630),  # whole windows of 30 s in its 655
        "qwen3_asr": AudioFamily(tokens_per_s=13, max_s=None),
    }
)
"""Family → what is known of it; the positions of all are plain ones, so that samples can share rows.

Source: transformers 5.23 models/*/processing_*.py: _process_audio, max_audio_len; models/whisper/
feature_extraction_whisper.py: 100 frames a second."""


def require_audio(family: str | None) -> None:
    """Raises InvalidConfig for a family that does not train on audio; None: one that is not known; the ranks know."""
    if family is not None and family not in TRAINS_AUDIO:
        raise InvalidConfig(
            f"{family} does not train on audio; {', '.join(sorted(TRAINS_AUDIO))} do",
            hint="Name a model of these families, or leave out the samples with audio.",
        )
