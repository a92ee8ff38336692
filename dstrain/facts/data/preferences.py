"""Parses one row of preferences: a pair of a chosen and a rejected last answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig, located
from dstrain.facts.data import media_kinds, untrained_columns
from dstrain.facts.data.sample_formats import NEEDS, PROMPTS, SIDES, Reading, Row, to_sample
from dstrain.facts.data.turns import Conversation

_BESIDE_TURNS = ("system", "tools", "functions", "weight", *media_kinds.COLUMNS)
_BESIDE_ANSWER = ("instruction", "input", "history", *_BESIDE_TURNS)
_NOT_READ = {
    name: kind for name, kind in untrained_columns.COLUMNS.items() if name not in SIDES
} | untrained_columns.MASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two conversations that differ in their last answer alone."""

    chosen: Conversation
    rejected: Conversation

    @property
    def sides(self) -> tuple[Conversation, Conversation]:
        """The chosen and the rejected conversation."""
        return self.chosen, self.rejected

    @property
    def has_media(self) -> bool:
        """Whether the prompt, which is the same on both sides, has images or videos."""
        return self.chosen.has_media

    @property
    def num_empty(self) -> int:
        """Answers without text and calls."""
        last = [side.messages[-1] for side in self.sides]
        return sum(not message["content"].strip() and not message.get("tool_calls") for message in last)

    @property
    def is_equal(self) -> bool:
        """Whether the answers are the same, so that nothing can be learned."""
        return self.chosen == self.rejected


def to_pair(row: Row, reading: Reading) -> Pair:
    """Returns the pair of a row.

    >>> to_pair({"prompt": "1 + 1", "chosen": "2", "rejected": "3"}, Reading()).rejected.messages
    [{'role': 'user', 'content': '1 + 1'}, {'role': 'assistant', 'content': '3'}]

    Formats: TRL's, as texts or messages, with the prompt apart or as the beginning of both sides; LLaMA-Factory's
    (data/README.md, preference datasets): `conversations` or `instruction` with an answer on each side. Raises
    InvalidConfig without a place; the caller adds file and line.
    """
    row = reading.row(row)
    missing = [name for name in SIDES if row.get(name) is None]
    if missing:
        raise InvalidConfig(f'"{missing[0]}" is missing; a pair needs {NEEDS[DataFormat.PREFERENCE]}')
    untrained_columns.refuse(row, _NOT_READ)
    chosen, rejected = (_whole(row, name, replace(reading, columns={})) for name in SIDES)
    prompts = [(side.messages[:-1], side.images, side.videos) for side in (chosen, rejected)]
    if prompts[0] != prompts[1]:
        raise InvalidConfig(
            "chosen and rejected differ before their last answer",
            hint="Both must have the same messages and images, except for the last message.",
        )
    return Pair(chosen=chosen, rejected=rejected)


def _whole(row: Row, name: str, reading: Reading) -> Conversation:
    """Returns the conversation of one side. Raises InvalidConfig that names the side."""
    with located(name):
        answer = _turns(row[name], "assistant")
        if row.get("instruction") is not None:
            asked = {key: row.get(key) for key in _BESIDE_ANSWER}
            return _conversation({**asked, "output": _text(answer)}, reading, DataFormat.ALPACA)
        prompt, beside = _prompt(row), {key: row.get(key) for key in _BESIDE_TURNS}
        turns = answer if len(answer) > 1 else [*prompt, *answer]
        found = _conversation({**beside, "messages": turns}, reading, DataFormat.MESSAGES)
        if len(answer) > 1 and prompt:
            unanswered = [*prompt, {"role": "assistant", "content": ""}]
            _require_beginning(_conversation({**beside, "messages": unanswered}, reading, DataFormat.MESSAGES), found)
        elif not any(message["role"] == "user" for message in found.messages):
            raise InvalidConfig("has no question", hint=f"A pair needs {NEEDS[DataFormat.PREFERENCE]}.")
        return found


def _conversation(row: Row, reading: Reading, data_format: DataFormat) -> Conversation:
    sample = to_sample(row, replace(reading, format=data_format))
    assert not isinstance(sample, str)
    return sample


def _require_beginning(prompt: Conversation, found: Conversation) -> None:
    """Raises InvalidConfig if a whole conversation does not begin with the prompt that its row has as well."""
    if found.messages[:-1] != prompt.messages[:-1]:
        raise InvalidConfig(
            "is a conversation that is not the prompt with one answer more",
            hint="Remove the prompt column, or write the answer alone.",
        )


def _prompt(row: Row) -> list[Any]:
    """Returns the turns before the answer, not yet checked; none if both sides have them."""
    column = next((name for name in PROMPTS if row.get(name) is not None), None)
    return [] if column is None else _turns(row[column], "user")


def _turns(value: Any, role: str) -> list[Any]:
    """Returns the turns of a value: a text, one turn, or a list of turns. Raises InvalidConfig for anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | Mapping):
        raise InvalidConfig(f"is {value!r}, not a text, a message or a list of messages")
    return [value] if isinstance(value, Mapping) else list(value)


def _text(answer: list[Any]) -> str:
    """Returns the text of a side that belongs to an instruction."""
    only = answer[0] if len(answer) == 1 else None
    text = only.get("content", only.get("value")) if isinstance(only, Mapping) else None
    if not isinstance(text, str):
        raise InvalidConfig("is not the text of one answer, which belongs to an instruction")
    return text
