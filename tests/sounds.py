"""Sound in files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16_000
"""Samples per second of the processors of Transformers."""


def tone(hertz: float, seconds: float, rate: int = RATE) -> Any:
    """Returns a tone that grows louder: (samples,), float32."""
    times = np.arange(round(rate * seconds)) / rate
    return (np.sin(2 * np.pi * hertz * times) * times / max(seconds, 1)).astype(np.float32)


def read_wav(file: Path) -> Any:
    """Returns the first channel of a file of `write_wav`: (samples,), float32."""
    with wave.open(str(file), "rb") as opened:
        pcm = np.frombuffer(opened.readframes(opened.getnframes()), "<i2")
        return pcm[:: opened.getnchannels()].astype(np.float32) / 32768


def write_wav(file: Path, sound: Any, rate: int = RATE) -> None:
    """Writes sound, (samples,) or (samples, channels) in -1…1, as 16-bit PCM."""
    pcm = np.round(np.asarray(sound) * 32767).astype("<i2")
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1 if pcm.ndim == 1 else pcm.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm.tobytes())
