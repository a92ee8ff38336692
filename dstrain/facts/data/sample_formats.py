"""Parses one training sample as a conversation or a text, in each supported format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig, nearest
from dstrain.facts.data import untrained_columns

Row = Mapping[str, Any]
Message = dict[str, str]

CONVERSATION_COLUMNS = ("messages", "conversations")
"""Columns with the turns of a conversation; the second name is ShareGPT's."""

NEEDS = MappingProxyType(
    {
        DataFormat.ALPACA: "instruction and output (optionally input, system, history)",
        DataFormat.MESSAGES: "messages or conversations (optionally system)",
        DataFormat.TEXT: "text",
    }
)
"""The columns of each format, in words."""

ROLES = MappingProxyType(
    {
        "system": "system",
        "user": "user",
        "human": "user",
        "assistant": "assistant",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "model": "assistant",
        "bot": "assistant",
    }
)
"""Speaker, as OpenAI or ShareGPT name it → role in chat templates."""

_USED = MappingProxyType(
    {
        DataFormat.ALPACA: frozenset({"instruction", "input", "output", "system", "history"}),
        DataFormat.MESSAGES: frozenset({"system"}),
        DataFormat.TEXT: frozenset({"text"}),
    }
)
"""Columns that are read, besides that of the turns."""

_USED_IN_TURNS = frozenset({"role", "content", "from", "value", "reasoning_content"})

_KNOWN_COLUMNS = ("instruction", "input", "output", "messages", "conversations", "text")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("query", "response"), ("question", "answer"))
"""Names of a question and its answer in other tools."""
_TYPO_RATIO = 0.8


def unused(row: Row, data_format: DataFormat) -> list[str]:
    """Returns the columns of a row, and the keys of its turns, that have a value but are not used.

    >>> unused({"text": "a", "source": "web", "note": None}, DataFormat.TEXT)
    ['source']
    """
    read = _turns_column(row) if data_format is DataFormat.MESSAGES else None
    used = _USED[data_format] | {read}
    names = [name for name, value in row.items() if name not in used and untrained_columns.is_given(value)]
    turns = row[read] if read is not None else []
    if turns and row.get("system") and ROLES.get(turns[0].get("role") or turns[0].get("from")) == "system":
        names.append("system")  # the conversation has a system turn
    keys = (key for turn in turns for key, value in turn.items() if untrained_columns.is_given(value))
    return [*names, *(f"{read}.{key}" for key in dict.fromkeys(keys) if key not in _USED_IN_TURNS)]


def unused_text(counts: Mapping[str, int]) -> str:
    """Returns a line about unused columns, given as name → number of samples with it.

    >>> unused_text({"source": 1200, "messages.name": 1})
    'unused columns: source (1,200 samples), messages.name (1 sample)'
    """
    words = (f"{name} ({count:,} sample{'s' if count > 1 else ''})" for name, count in counts.items())
    return f"unused columns: {', '.join(words)}"


def _turns_column(row: Row) -> str | None:
    return next((name for name in CONVERSATION_COLUMNS if row.get(name) is not None), None)


def detect(columns: Iterable[str]) -> DataFormat:
    """Returns the format of the columns; a conversation takes precedence over a pair, and a pair over a text.

    >>> detect(["instruction", "input", "output", "text"]).value
    'alpaca'

    Raises InvalidConfig with the columns and those that each format needs.
    """
    names = list(columns)
    for data_format in (DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT):
        if _has(names, data_format):
            return data_format
    for column in names:
        untrained_columns.refuse_name(column)
    needs = "; ".join(f"{data_format.value} needs {words}" for data_format, words in NEEDS.items())
    raise InvalidConfig(f"no known format has the columns {_listed(names)}; {needs}", hint=_renaming(names))


def _renaming(columns: list[str]) -> str:
    """Returns a hint for unknown columns: the names of a pair, or the closest known names."""
    for question, answer in _PAIRS:
        if question in columns and answer in columns:
            return f'Rename "{question}" to instruction and "{answer}" to output.'
    near = [(column, nearest(column, _KNOWN_COLUMNS)) for column in columns if column not in _KNOWN_COLUMNS]
    hints = [f'"{column}": did you mean "{name}"?' for column, name in near if name and _is_typo(column, name)]
    return " ".join(hints) or "Rename the columns to those of one of the formats."


def _is_typo(column: str, name: str) -> bool:
    """Returns whether two names differ in a letter or two only.

    >>> _is_typo("mesages", "messages"), _is_typo("completion", "conversations")
    (True, False)
    """
    return SequenceMatcher(None, column.lower(), name).ratio() >= _TYPO_RATIO


def require(columns: Iterable[str], data_format: DataFormat) -> DataFormat:
    """Returns the format, detected if it is `auto`. Raises InvalidConfig if its columns are missing."""
    names = list(columns)
    if data_format is DataFormat.AUTO:
        return detect(names)
    if not _has(names, data_format):
        raise InvalidConfig(
            f"the format {data_format.value} needs {NEEDS[data_format]}; the columns are {_listed(names)}",
            hint="Set data_format to auto, or rename the columns.",
        )
    return data_format


def _has(columns: list[str], data_format: DataFormat) -> bool:
    if data_format is DataFormat.MESSAGES:
        return any(column in columns for column in CONVERSATION_COLUMNS)
    needed = {"instruction", "output"} if data_format is DataFormat.ALPACA else {"text"}
    return needed <= set(columns)


def _listed(columns: list[str]) -> str:
    return ", ".join(columns) if columns else "(none)"


def to_messages(row: Row, data_format: DataFormat) -> list[Message] | str:
    """Returns the conversation of a row, which ends with the assistant, or its text if the format is `text`.

    >>> to_messages({"instruction": "Add.", "input": "1 + 1", "output": "2"}, DataFormat.ALPACA)
    [{'role': 'user', 'content': 'Add.\\n1 + 1'}, {'role': 'assistant', 'content': '2'}]

    Raises InvalidConfig without a place; the caller adds file and line.
    """
    if data_format is DataFormat.AUTO:
        data_format = detect(row)
    untrained_columns.refuse(row, untrained_columns.COLUMNS)
    if data_format is DataFormat.TEXT:
        return _string(row, "text")
    messages = _from_alpaca(row) if data_format is DataFormat.ALPACA else _from_turns(row)
    for number, message in enumerate(messages, start=1):
        untrained_columns.refuse_placeholder(message["content"], f"turn {number}, of the {message['role']}: ")
    return messages


def _from_alpaca(row: Row) -> list[Message]:
    """Returns the conversation; instruction and input are joined by a line break.

    Source: LLaMA-Factory data/converter.py: AlpacaDatasetConverter.
    """
    messages = _system(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise InvalidConfig(f'"history" is {_shown(history)}; it must be a list of [question, answer] pairs')
    for number, pair in enumerate(history, start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise InvalidConfig(f'"history" {number} is {_shown(pair)}; it must be a [question, answer] pair')
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = [_string(row, "instruction"), _string(row, "input") if row.get("input") is not None else ""]
    question = "\n".join(part for part in parts if part)
    if not question:
        raise InvalidConfig('"instruction" is empty')
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": _string(row, "output")}]


def _from_turns(row: Row) -> list[Message]:
    column = _turns_column(row)
    if column is None:
        raise InvalidConfig('"messages" is missing')
    turns = row[column]
    if not isinstance(turns, list):
        raise InvalidConfig(f'"{column}" is {_shown(turns)}; it must be a list of turns')
    if not turns:
        raise InvalidConfig(f'"{column}" is empty')
    messages = [_turn(turn, f"{column} {number}") for number, turn in enumerate(turns, start=1)]
    if messages[0]["role"] != "system":
        messages = [*_system(row), *messages]
    if messages[-1]["role"] != "assistant":
        raise InvalidConfig(
            f'"{column}" ends with the {messages[-1]["role"]}; the last turn must be the assistant\'s',
            hint="Remove the turns after the last answer.",
        )
    return messages


def _turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise InvalidConfig(f"{place} is {_shown(turn)}; a turn must be an object with role and content")
    role_key, text_key = ("from", "value") if turn.get("role") is None and "from" in turn else ("role", "content")
    name = _string(turn, role_key, place)
    if name not in ROLES:
        near = nearest(name, ROLES)
        raise InvalidConfig(
            f'{place}: {role_key} is "{name}", not system, user (human) or assistant (gpt)',
            hint=f'Did you mean "{near}"?' if near else None,
        )
    untrained_columns.refuse(turn, untrained_columns.KEYS, f"{place}: ")
    message = {"role": ROLES[name], "content": _content(turn, text_key, place)}
    if turn.get("reasoning_content") is not None:
        message["reasoning_content"] = _string(turn, "reasoning_content", place)
    return message


def _content(turn: Row, key: str, place: str) -> str:
    """Returns the text of a turn; OpenAI's list of text parts is joined."""
    parts = turn.get(key)
    if not isinstance(parts, list):
        return _string(turn, key, place)
    if not all(map(_is_text_part, parts)):
        raise InvalidConfig(f"{place}: {key} has parts that are not text, which is not supported")
    return "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    """Returns whether a part of a turn is text only: an image may come with text."""
    is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
    return is_text and part.get("type") in (None, "text", "input_text", "output_text")


def _system(row: Row) -> list[Message]:
    if row.get("system") is None or row["system"] == "":
        return []
    return [{"role": "system", "content": _string(row, "system")}]


def _string(row: Row, key: str, place: str | None = None) -> str:
    value = row.get(key)
    before = f"{place}: " if place else ""
    if value is None:
        raise InvalidConfig(f'{before}"{key}" is missing')
    if not isinstance(value, str):
        raise InvalidConfig(f'{before}"{key}" is {_shown(value)}; it must be a string')
    return value


def _shown(value: Any) -> str:
    """Returns a value as short JSON, for a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
