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
"""Where the turns of a conversation stand; the second name is ShareGPT's."""

NEEDS = MappingProxyType(
    {
        DataFormat.ALPACA: "instruction and output (and may have input, system, history)",
        DataFormat.MESSAGES: "messages or conversations (and may have system)",
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
"""Names of the speakers, OpenAI's and ShareGPT's, and the role that a chat template knows."""

_USED = MappingProxyType(
    {
        DataFormat.ALPACA: frozenset({"instruction", "input", "output", "system", "history"}),
        DataFormat.MESSAGES: frozenset({"system"}),
        DataFormat.TEXT: frozenset({"text"}),
    }
)
"""The columns that are read, beside the one of the turns."""

_USED_IN_TURNS = frozenset({"role", "content", "from", "value", "reasoning_content"})

_KNOWN_COLUMNS = ("instruction", "input", "output", "messages", "conversations", "text")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("query", "response"), ("question", "answer"))
"""What other tools call a question and its answer."""
_SLIP_RATIO = 0.8


def unused(row: Row, data_format: DataFormat) -> list[str]:
    """Returns the columns of a row, and the keys of its turns, that hold something nobody reads.

    >>> unused({"text": "a", "source": "web", "note": None}, DataFormat.TEXT)
    ['source']
    """
    read = _turns_column(row) if data_format is DataFormat.MESSAGES else None
    used = _USED[data_format] | {read}
    names = [name for name, value in row.items() if name not in used and untrained_columns.is_given(value)]
    turns = row[read] if read is not None else []
    if turns and row.get("system") and ROLES.get(turns[0].get("role") or turns[0].get("from")) == "system":
        names.append("system")  # the conversation has its own
    keys = (key for turn in turns for key, value in turn.items() if untrained_columns.is_given(value))
    return [*names, *(f"{read}.{key}" for key in dict.fromkeys(keys) if key not in _USED_IN_TURNS)]


def unused_text(counts: Mapping[str, int]) -> str:
    """Returns in words what nobody reads, given as name → samples that hold it.

    >>> unused_text({"source": 1200, "messages.name": 1})
    'not trained on: source (1,200 samples), messages.name (1 sample)'
    """
    words = (f"{name} ({count:,} sample{'s' if count > 1 else ''})" for name, count in counts.items())
    return f"not trained on: {', '.join(words)}"


def _turns_column(row: Row) -> str | None:
    return next((name for name in CONVERSATION_COLUMNS if row.get(name) is not None), None)


def detect(columns: Iterable[str]) -> DataFormat:
    """Returns the format that the columns belong to; a conversation goes before a pair, a pair before a text.

    >>> detect(["instruction", "input", "output", "text"]).value
    'alpaca'

    Raises InvalidConfig with the columns found and what each format needs.
    """
    found = list(columns)
    for data_format in (DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT):
        if _has(found, data_format):
            return data_format
    for column in found:
        untrained_columns.refuse_name(column)
    needs = "; ".join(f"{data_format.value} needs {words}" for data_format, words in NEEDS.items())
    raise InvalidConfig(f"no known format has the columns {_listed(found)}; {needs}", hint=_renaming(found))


def _renaming(columns: list[str]) -> str:
    """Returns what to call columns of no known format: a pair by its names elsewhere, a slip by what it is near."""
    for question, answer in _PAIRS:
        if question in columns and answer in columns:
            return f'Call "{question}" instruction and "{answer}" output.'
    near = [(column, nearest(column, _KNOWN_COLUMNS)) for column in columns if column not in _KNOWN_COLUMNS]
    meant = [f'"{column}": did you mean "{name}"?' for column, name in near if name and _is_slip(column, name)]
    return " ".join(meant) or "Rename the columns to those of one of the formats."


def _is_slip(column: str, name: str) -> bool:
    """Returns whether one name is the other but for a letter or two.

    >>> _is_slip("mesages", "messages"), _is_slip("completion", "conversations")
    (True, False)
    """
    return SequenceMatcher(None, column.lower(), name).ratio() >= _SLIP_RATIO


def require(columns: Iterable[str], data_format: DataFormat) -> DataFormat:
    """Returns the format, detected where it is `auto`. Raises InvalidConfig when its columns are not there."""
    found = list(columns)
    if data_format is DataFormat.AUTO:
        return detect(found)
    if not _has(found, data_format):
        raise InvalidConfig(
            f"the format {data_format.value} needs {NEEDS[data_format]}; the columns are {_listed(found)}",
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
    """Returns the conversation of a row, which ends with the assistant, or its text where the format is `text`.

    >>> to_messages({"instruction": "Add.", "input": "1 + 1", "output": "2"}, DataFormat.ALPACA)
    [{'role': 'user', 'content': 'Add.\\n1 + 1'}, {'role': 'assistant', 'content': '2'}]

    Raises InvalidConfig with what is wrong; the caller says in which file and line.
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
        raise InvalidConfig(f'"history" is {_shown(history)}; it has to be a list of [question, answer] pairs')
    for number, pair in enumerate(history, start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise InvalidConfig(f'"history" {number} is {_shown(pair)}; it has to be a [question, answer] pair')
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
        raise InvalidConfig(f'"{column}" is {_shown(turns)}; it has to be a list of turns')
    if not turns:
        raise InvalidConfig(f'"{column}" is empty')
    messages = [_turn(turn, f"{column} {number}") for number, turn in enumerate(turns, start=1)]
    if messages[0]["role"] != "system":
        messages = [*_system(row), *messages]
    if messages[-1]["role"] != "assistant":
        raise InvalidConfig(
            f'"{column}" ends with the {messages[-1]["role"]}; the last turn has to be the assistant\'s',
            hint="Leave out the turns after the last answer.",
        )
    return messages


def _turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise InvalidConfig(f"{place} is {_shown(turn)}; a turn has to be an object with role and content")
    role_key, text_key = ("from", "value") if turn.get("role") is None and "from" in turn else ("role", "content")
    name = _string(turn, role_key, place)
    if name not in ROLES:
        near = nearest(name, ROLES)
        raise InvalidConfig(
            f'{place}: {role_key} is "{name}"; legal are system, user (human) and assistant (gpt)',
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
        raise InvalidConfig(f"{place}: {key} has parts that are not text; only text can be trained on")
    return "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    """Returns whether a part of a turn is text and nothing else: an image may come with a text of its own."""
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
        raise InvalidConfig(f'{before}"{key}" is {_shown(value)}; it has to be a string')
    return value


def _shown(value: Any) -> str:
    """Returns a value as short JSON, for a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
