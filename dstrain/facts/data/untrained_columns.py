"""Refuses columns that are not supported and whose loss would change the meaning of a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data.media_kinds import KINDS
from dstrain.facts.data.row_values import is_given


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
MEDIA = MappingProxyType({name: kind for kind in _MEDIA for name in kind.names})
"""Column → kind of images and videos where they are not trained: in texts."""
_PLACED = tuple(
    replace(kind, hint=f'Write them in a column "{kind.names[0]}" beside the turns, or as parts of the turn.')
    for kind in _MEDIA
)
_SCALES = Untrained(names=("loss_scale",), says=_WEIGHTS, hint=_COUNTED, matters=_weighs)
_MASKS = Untrained(names=("loss_mask",), says=_WEIGHTS, hint=_COUNTED, matters=_weighs)
MASKS = MappingProxyType(dict.fromkeys(_MASKS.names, _MASKS))
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
COLUMNS, KEYS = (
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
    if column in COLUMNS:
        raise _refused(column, COLUMNS[column])


def refuse_placeholder(text: str, place: str) -> None:
    """Raises InvalidConfig if a text contains a placeholder such as `<image>`."""
    placeholder = _PLACEHOLDER.search(text)
    if placeholder is not None:
        raise _refused(placeholder[0], _WITHOUT_FILE, place)


def _refused(name: str, kind: Untrained, place: str = "") -> InvalidConfig:
    return InvalidConfig(f'{place}"{name}" {kind.says}, which is not supported', hint=kind.hint)
