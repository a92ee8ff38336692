"""Writes sound given as numbers as a WAV file, the form in which it goes on."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

_FLOAT = 3
"""WAVE_FORMAT_IEEE_FLOAT. Source: Microsoft mmreg.h."""


def wav_of(samples: Sequence[Any], rate: int) -> bytes:
    """Returns samples, (samples,) or (channels, samples), with `rate` of them a second, as a WAV file of float32.

    Raises TypeError or ValueError for other things.

    >>> len(wav_of([0.0, 0.5, -0.5], 16000)), wav_of([[0.0], [1.0]], 8000)[22:24]
    (56, b'\\x02\\x00')
    """
    channels = len(samples) if samples and isinstance(samples[0], Sequence) else 1
    numbers = array("f", samples if channels == 1 else chain.from_iterable(zip(*samples, strict=True)))
    width = channels * numbers.itemsize
    form = struct.pack("<HHIIHH", _FLOAT, channels, rate, rate * width, width, 8 * numbers.itemsize)
    content = numbers.tobytes()
    chunks = [b"fmt ", struct.pack("<I", len(form)), form, b"data", struct.pack("<I", len(content)), content]
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body
