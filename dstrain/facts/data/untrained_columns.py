"""Refuses columns that cannot be trained on yet, because dropping them would change the meaning of a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from types import MappingProxyType
from typing import Any

from dstrain.errors import InvalidConfig


def is_given(value: Any) -> bool:
    """Returns whether a value says anything; files fill absent ones with null, NaN or what is empty."""
    if isinstance(value, float) and isnan(value):
        return False
    return value is not None and value not in ("", "[]", "{}", "null") and value != [] and value != {}


def _weighs(value: Any) -> bool:
    """Returns whether a weight or a mask asks for anything but what is done anyway: everything counts once."""
    return any(map(_weighs, value)) if isinstance(value, list) else is_given(value) and value != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrained:
    """Columns, or keys of a turn, whose meaning would be lost."""

    names: tuple[str, ...]
    """What the formats of LLaMA-Factory, ms-swift, TRL, axolotl and OpenAI call them."""
    says: str
    """What they say."""
    hint: str
    """What to do."""
    matters: Callable[[Any], bool] = is_given
    """Whether a value of theirs does say so."""


_WEIGHTS = "weighs or masks what is learned"
_PREFERENCE = "says which answer is the better one"
_PREFERRED = "Keep the better answers alone, as messages or as instruction and output."
_COUNTED = "Leave out what is not to be learned; loss_on says which tokens count in the loss."
_MEDIA = Untrained(
    names=("image", "images", "video", "videos", "audio", "audios"),
    says="names images, video or sound",
    hint="Leave these samples out: without what they are about, their text teaches wrong answers.",
)
_ANYWHERE = (
    _MEDIA,
    Untrained(
        names=("tools", "functions", "tool_calls", "function_call"),
        says="is about tools",
        hint="Leave these samples out; where no tool is called, remove the column.",
    ),
    Untrained(names=("weight", "loss_mask", "loss_scale"), says=_WEIGHTS, hint=_COUNTED, matters=_weighs),
)
_IN_ROWS = (
    *_ANYWHERE,
    Untrained(
        names=(
            *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images"),
            *("preferred_output", "non_preferred_output"),
        ),
        says=_PREFERENCE,
        hint=_PREFERRED,
    ),
    Untrained(names=("kto_tag", "label"), says=_PREFERENCE, hint=_PREFERRED, matters=lambda value: value is False),
)
_IN_TURNS = (
    *_ANYWHERE,
    Untrained(names=("tool_call_id",), says="is about tools", hint=_ANYWHERE[1].hint),
    Untrained(names=("loss", "train", "train_detail"), says=_WEIGHTS, hint=_COUNTED, matters=_weighs),
    Untrained(names=("mask",), says=_WEIGHTS, hint=_COUNTED, matters=lambda value: value is True),
    Untrained(names=("thinking", "reasoning"), says="holds thoughts", hint="Call it reasoning_content."),
)
COLUMNS, KEYS = (
    MappingProxyType({name: kind for kind in kinds for name in kind.names}) for kinds in (_IN_ROWS, _IN_TURNS)
)
"""Name → kind, of columns and of the keys of a turn."""

_PLACEHOLDER = re.compile(r"(?<!`)<(\|?)(image|video|audio)(?:_pad|_\d+)?\1>(?!`)(?!.*</\2>)", re.DOTALL)
"""Where an image, a video or sound stands in a text; `<video>` between backticks or with its `</video>` is HTML."""


def refuse(row: Mapping[str, Any], kinds: Mapping[str, Untrained], place: str = "") -> None:
    """Raises InvalidConfig where a row or a turn, which stands at `place`, holds something of one of these kinds."""
    for name, value in row.items():
        kind = kinds.get(name)
        if kind is not None and kind.matters(value):
            raise _refused(name, kind, place)


def refuse_name(column: str) -> None:
    """Raises InvalidConfig for a column of one of these kinds, where no format is known to have it."""
    if column in COLUMNS:
        raise _refused(column, COLUMNS[column])


def refuse_placeholder(text: str, place: str) -> None:
    """Raises InvalidConfig where a text holds a placeholder such as `<image>`."""
    placeholder = _PLACEHOLDER.search(text)
    if placeholder is not None:
        raise _refused(placeholder[0], _MEDIA, place)


def _refused(name: str, kind: Untrained, place: str = "") -> InvalidConfig:
    return InvalidConfig(f'{place}"{name}" {kind.says}, which cannot be trained on yet', hint=kind.hint)
