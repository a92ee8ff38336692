"""Columns of rows: whether a value is given, which hold images and videos, and which are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isnan
from types import MappingProxyType
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.units import counted


def is_given(value: Any) -> bool:
    """Returns whether a value is set; files fill missing ones with null, NaN or something empty."""
    if value is None:
        return False
    if isinstance(value, float) and isnan(value):
        return False
    return value not in ("", "[]", "{}", "null") and value != [] and value != {}


def string(row: Mapping[str, Any], key: str, place: str | None = None) -> str:
    """Returns the string at a key. Raises InvalidConfig if it is missing or no string."""
    value = row.get(key)
    if isinstance(value, str):
        return value
    before = f"{place}: " if place else ""
    if value is None:
        raise InvalidConfig(f'{before}"{key}" is missing')
    raise InvalidConfig(f'{before}"{key}" is {shown(value)}; it must be a string')


def shown(value: Any) -> str:
    """Returns a value as short JSON, for a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def without_missing(value: Any) -> Any:
    """Returns a value without the keys that are None in nested objects: Arrow gives every object all keys.

    >>> without_missing({"a": None, "b": [{"c": 1, "d": None}]})
    {'b': [{'c': 1}]}
    """
    if isinstance(value, Mapping):
        return {key: without_missing(item) for key, item in value.items() if item is not None}
    return [without_missing(item) for item in value] if isinstance(value, list) else value


def unused_text(counts: Mapping[str, int]) -> str:
    """Returns a line about unused columns, given as name → number of samples with it.

    >>> unused_text({"source": 1200, "messages.name": 1})
    'unused columns: source (1,200 samples), messages.name (1 sample)'
    """
    words = (f"{name} ({count:,} sample{'s' if count > 1 else ''})" for name, count in counts.items())
    return f"unused columns: {', '.join(words)}"


def unusable(count: int) -> str:
    """Returns a number of unusable rows with its verb.

    >>> unusable(1), unusable(2)
    ('1 unusable row was', '2 unusable rows were')
    """
    return f"{counted(count, 'unusable row')} {'was' if count == 1 else 'were'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Images or videos."""

    article: str
    """The article of its name."""
    noun: str
    """Its name, which is also its mark in a text."""
    columns: tuple[str, ...]
    """Columns with one, or a list of them; the first is also a key of `turns.Message`."""
    types: tuple[str, ...]
    """Types of the parts of a turn."""
    values: tuple[str, ...]
    """Keys of a part that name the file."""
    content: str
    """Media type of its content, in an example."""
    limits: str
    """Keys of the job that hold for all of them."""
    has_frames: bool = False
    """Whether it may be a list of images."""

    @property
    def mark(self) -> str:
        """Its place in a text."""
        return f"<{self.noun}>"


IMAGE = Kind(
    article="an",
    noun="image",
    columns=("images", "image"),
    types=("image", "image_url", "input_image"),
    values=("image", "image_url", "url", "path"),
    content="image/png",
    limits="max_pixels and min_pixels",
)
"""Source: LLaMA-Factory, ms-swift, TRL (columns), Transformers and Qwen (`image`), OpenAI (the other types)."""
VIDEO = Kind(
    article="a",
    noun="video",
    columns=("videos", "video"),
    types=("video", "video_url"),
    values=("video", "video_url", "url", "path"),
    content="video/mp4",
    limits="video_fps, video_maxlen and video_max_pixels",
    has_frames=True,
)
"""Source: LLaMA-Factory, ms-swift (columns), Transformers and Qwen (`video`), vLLM's form of OpenAI's (`video_url`)."""
KINDS = (IMAGE, VIDEO)
IMAGES, VIDEOS = MEDIA = tuple(kind.columns[0] for kind in KINDS)
"""Columns of a sample in tokens with the files of its images, and with the files of each of its videos."""
MEDIA_COLUMNS = tuple(name for kind in KINDS for name in kind.columns)


def _weighs(value: Any) -> bool:
    """Returns whether a weight or a mask differs from the default, in which every token counts once."""
    return any(map(_weighs, value)) if isinstance(value, list) else is_given(value) and value != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrained:
    """Columns, or keys of a turn, whose meaning would be lost."""

    names: tuple[str, ...]
    """Their names in the formats of LLaMA-Factory, ms-swift, TRL, axolotl and OpenAI."""
    says: str
    """Their meaning, as the predicate of a message."""
    hint: str
    matters: Callable[[Any], bool] = is_given
    """Returns whether a value has this meaning."""


_WEIGHTS = "weights or masks tokens in the loss"
_PREFERENCE = "marks the preferred answer"
_PREFERRED = "Keep only the preferred answers, as messages or as instruction and output."
_DPO = "Or train on both: task: dpo, with the columns chosen and rejected."
_COUNTED = "Give each turn a weight of 0 or 1; loss_on selects the answers that count in the loss."
_ALONE = "Leave these samples out: their text alone teaches wrong answers."
_MEDIA = tuple(Untrained(names=kind.columns, says=f"holds {kind.columns[0]}", hint=_ALONE) for kind in KINDS)
UNTRAINED_MEDIA = MappingProxyType({name: kind for kind in _MEDIA for name in kind.names})
"""Column → kind of images and videos, for texts, which do not train on them."""
_PLACED = tuple(
    replace(kind, hint=f'Write them in a column "{kind.names[0]}" beside the turns, or as parts of the turn.')
    for kind in _MEDIA
)
_SCALES = Untrained(names=("loss_scale",), says=_WEIGHTS, hint=_COUNTED, matters=_weighs)
_MASKS = Untrained(names=("loss_mask",), says=_WEIGHTS, hint=_COUNTED, matters=_weighs)
UNTRAINED_MASKS = MappingProxyType(dict.fromkeys(_MASKS.names, _MASKS))
"""Column → kind of masks that are not trained: beside anything but turns."""
_SOUND = Untrained(names=("audios", "audio"), says="holds sound", hint=_ALONE)
_IN_ROWS = (
    _SCALES,
    _SOUND,
    Untrained(
        names=(
            *("rejected_response", "rejected_messages", "rejected_images"),
            *("preferred_output", "non_preferred_output"),
        ),
        says=_PREFERENCE,
        hint=f"{_PREFERRED} {_DPO}",
    ),
    Untrained(names=("chosen", "rejected"), says=_PREFERENCE, hint=f"{_PREFERRED} {_DPO}"),
    Untrained(names=("kto_tag", "label"), says=_PREFERENCE, hint=_PREFERRED, matters=lambda value: value is False),
)
_IN_TURNS = (
    _SCALES,
    _SOUND,
    *_PLACED,
    Untrained(names=("train_detail",), says=_WEIGHTS, hint=_COUNTED),
    Untrained(names=("thinking", "reasoning"), says="holds thoughts", hint="Rename it to reasoning_content."),
)
UNTRAINED_COLUMNS, UNTRAINED_KEYS = (
    MappingProxyType({name: kind for kind in kinds for name in kind.names}) for kinds in (_IN_ROWS, _IN_TURNS)
)
"""Name → kind, of columns and of the keys of a turn."""

_PLACEHOLDER = re.compile(r"(?<!`)<(\|?)(image|video|audio)(?:_pad|_\d+)?\1>(?!`)(?!.*</\2>)", re.DOTALL)
"""Placeholders of images, video and audio; `<video>` between backticks or with `</video>` is HTML."""
_WITHOUT_FILE = Untrained(
    names=(),
    says="stands for an image, video or audio without a file",
    hint='Write <image> and <video>, and the paths in columns "images" and "videos"; nothing trains on sound.',
)


def refuse(row: Mapping[str, Any], kinds: Mapping[str, Untrained], place: str = "") -> None:
    """Raises InvalidConfig if a row or a turn at `place` holds a value of one of these kinds."""
    if kinds.keys().isdisjoint(row):
        return
    for name, value in row.items():
        kind = kinds.get(name)
        if kind is not None and kind.matters(value):
            raise _refused(name, kind, place)


def refuse_name(column: str) -> None:
    """Raises InvalidConfig for a column of one of these kinds."""
    if column in UNTRAINED_COLUMNS:
        raise _refused(column, UNTRAINED_COLUMNS[column])


def refuse_placeholder(text: str, place: str) -> None:
    """Raises InvalidConfig if a text contains a placeholder such as `<image>`."""
    placeholder = _PLACEHOLDER.search(text)
    if placeholder is not None:
        raise _refused(placeholder[0], _WITHOUT_FILE, place)


def _refused(name: str, kind: Untrained, place: str = "") -> InvalidConfig:
    return InvalidConfig(f'{place}"{name}" {kind.says}, which is not supported', hint=kind.hint)
