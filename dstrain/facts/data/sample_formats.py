"""Parses one training sample as a conversation or a text, in each supported format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

from dstrain.choices import Column, DataFormat
from dstrain.errors import InvalidConfig, nearest
from dstrain.facts.data import media, media_kinds, untrained_columns
from dstrain.facts.data.row_values import is_given, shown, string
from dstrain.facts.data.tool_calls import TOOL_COLUMNS, tools_of
from dstrain.facts.data.turns import Conversation, Message, carries_loss, masked, parse, role_of, unused_keys

Row = Mapping[str, Any]

CONVERSATION_COLUMNS = ("messages", "conversations")
"""Columns with the turns of a conversation; the second name is ShareGPT's."""

NEEDS = MappingProxyType(
    {
        DataFormat.ALPACA: "instruction and output (optionally input, system, history), prompt and completion, "
        "prompt and response, query and response, or question and answer (optionally images, videos)",
        DataFormat.MESSAGES: "messages or conversations (optionally system, tools, images, videos)",
        DataFormat.TEXT: "text",
        DataFormat.PREFERENCE: "chosen and rejected, each an answer or a conversation that ends with it, and with "
        "answers their prompt (or question, instruction and input, messages, conversations; optionally system, tools)",
    }
)
"""The columns of each format, in words."""

_PAIRS = (
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "answer"),
)
"""Columns of a question and its answer: Stanford Alpaca, TRL, ms-swift, and data sets of questions."""
SIDES = ("chosen", "rejected")
"""Columns of the two answers of a pair."""
PROMPTS = ("prompt", "question", *CONVERSATION_COLUMNS)
"""Columns with the prompt of a pair: a text, or turns. One of them is read, or the columns of an instruction."""
_BESIDE = ("system", "weight", *TOOL_COLUMNS, *media_kinds.COLUMNS)
_NEEDED = frozenset({*(name for pair in _PAIRS for name in pair), *CONVERSATION_COLUMNS, "text", *SIDES})
"""Columns of which a format needs some; the others may be missing from a row."""
_TYPO_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the rows of a data set become samples."""

    format: DataFormat = DataFormat.AUTO
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a column → its name in the file."""
    system: str | None = None
    """The system prompt of conversations without one."""

    def row(self, row: Row) -> Row:
        """Returns a row under our column names; a column whose name another one takes is left out."""
        if not self.columns:
            return row
        taken = {*self.columns, *self.columns.values()}
        ours = {str(name): row[column] for name, column in self.columns.items() if column in row}
        return {name: value for name, value in row.items() if name not in taken} | ours

    def names(self, columns: Iterable[str]) -> list[str]:
        """Returns the columns of a file under our names. Raises InvalidConfig if it lacks one of `columns`."""
        names = list(columns)
        for name, column in self.columns.items():
            if column not in names and name in _NEEDED:
                near = nearest(column, names)
                raise InvalidConfig(
                    f'columns: {name} is "{column}", but the columns are {_listed(names)}',
                    hint=f'Did you mean "{near}"?' if near else None,
                )
        return list(self.row(dict.fromkeys(names)))


PLAIN = Reading()
"""As the columns say."""


def unused(row: Row, reading: Reading) -> list[str]:
    """Returns the columns of a row, and the keys of its turns, that have a value but are not used.

    >>> unused({"text": "a", "source": "web", "note": None}, Reading(format=DataFormat.TEXT))
    ['source']
    """
    ours = reading.row(row)
    used = _used(ours, reading.format)
    in_file = {reading.columns.get(name, name) for name in used}
    names = [name for name, value in row.items() if name not in in_file and is_given(value)]
    column = _turns_column(ours)
    if reading.format is not DataFormat.MESSAGES or column is None:
        return names
    turns = ours[column]
    if is_given(ours.get("system")) and role_of(turns[0]) == "system":
        names.append(reading.columns.get("system", "system"))  # the conversation has a system turn
    return [*names, *(f"{column}.{key}" for key in unused_keys(turns))]


def _used(row: Row, data_format: DataFormat) -> set[str]:
    if data_format is DataFormat.TEXT:
        return {"text", "weight"}
    if data_format is DataFormat.PREFERENCE:
        of_alpaca = ["instruction", "input", "history"] if row.get("instruction") is not None else []
        prompts = of_alpaca or [name for name in PROMPTS if row.get(name) is not None][:1]
        return {*SIDES, *prompts, *_BESIDE}
    if data_format is DataFormat.MESSAGES:
        return {_turns_column(row) or "", "loss_mask", *_BESIDE}
    question, answer = _pair(row) or ("", "")
    return {question, answer, "history", *(("input",) if question == "instruction" else ()), *_BESIDE}


def _turns_column(row: Row) -> str | None:
    return next((name for name in CONVERSATION_COLUMNS if row.get(name) is not None), None)


def _pair(columns: Iterable[str]) -> tuple[str, str] | None:
    """Returns the names of question and answer, or None if no pair is whole."""
    names = set(columns)
    return next((pair for pair in _PAIRS if names.issuperset(pair)), None)


def detect(columns: Iterable[str]) -> DataFormat:
    """Returns the format of the columns; a conversation takes precedence over a pair, and a pair over a text.

    >>> detect(["instruction", "input", "output", "text"]).value
    'alpaca'

    Raises InvalidConfig with the columns and those that each format needs.
    """
    names = list(columns)
    for data_format in (DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT):
        if has_columns(names, data_format):
            return data_format
    for column in names:
        untrained_columns.refuse_name(column)
    needs = "; ".join(f"{data_format.value} needs {words}" for data_format, words in NEEDS.items())
    raise InvalidConfig(f"no known format has the columns {_listed(names)}; {needs}", hint=_renaming(names))


def _renaming(columns: list[str]) -> str:
    """Returns a hint for unknown columns: the closest known names, or how to name them in the job."""
    near = [(column, nearest(column, list(Column))) for column in columns if column not in list(Column)]
    hints = [f'"{column}": did you mean "{name}"?' for column, name in near if name and _is_typo(column, name)]
    return " ".join(hints) or "Name the columns in the job: columns: {question: YOUR_COLUMN, answer: YOUR_COLUMN}."


def _is_typo(column: str, name: str) -> bool:
    """Returns whether two names differ in a letter or two only.

    >>> _is_typo("mesages", "messages"), _is_typo("completion", "conversations")
    (True, False)
    """
    return SequenceMatcher(None, column.lower(), name).ratio() >= _TYPO_RATIO


def require(columns: Iterable[str], reading: Reading) -> Reading:
    """Returns the reading with its format, detected if it is `auto`. Raises InvalidConfig if columns are missing."""
    names = reading.names(columns)
    if reading.format is DataFormat.AUTO:
        return replace(reading, format=detect(names))
    if not has_columns(names, reading.format):
        raise InvalidConfig(
            f"the format {reading.format.value} needs {NEEDS[reading.format]}; the columns are {_listed(names)}",
            hint="Change task or data_format, or name the columns in the job: columns: {NAME: YOUR_COLUMN}.",
        )
    return reading


def has_columns(columns: Iterable[str], data_format: DataFormat) -> bool:
    """Returns whether columns are those that a format needs."""
    columns = set(columns)
    if data_format is DataFormat.MESSAGES:
        return not columns.isdisjoint(CONVERSATION_COLUMNS)
    if data_format is DataFormat.PREFERENCE:
        return columns.issuperset(SIDES)
    return _pair(columns) is not None if data_format is DataFormat.ALPACA else "text" in columns


def _listed(columns: list[str]) -> str:
    return ", ".join(columns) if columns else "(none)"


def to_sample(row: Row, reading: Reading) -> Conversation | str:
    """Returns the conversation of a row, which ends with the assistant, or its text if the format is `text`.

    >>> to_sample({"instruction": "Add.", "input": "1 + 1", "output": "2"}, Reading(format=DataFormat.ALPACA)).messages
    [{'role': 'user', 'content': 'Add.\\n1 + 1'}, {'role': 'assistant', 'content': '2'}]

    Raises InvalidConfig without a place; the caller adds file and line.
    """
    row = reading.row(row)
    untrained_columns.refuse(row, untrained_columns.COLUMNS)
    if reading.format is not DataFormat.MESSAGES:
        untrained_columns.refuse(row, untrained_columns.MASKS)
    learns = carries_loss(row.get("weight"), '"weight"')
    if reading.format is DataFormat.TEXT:
        untrained_columns.refuse(row, untrained_columns.MEDIA)
        if not learns:
            raise InvalidConfig('"weight" is 0, and a text has no other part', hint="Remove the row.")
        return string(row, "text")
    messages, unlearned = _from_pair(row) if reading.format is DataFormat.ALPACA else _from_turns(row)
    messages, found = media.attach(row, messages)
    kinds = [kind for kind in media_kinds.KINDS if found[kind.columns[0]]]
    for number, message in enumerate(messages, start=1):
        text = media.without_marks(message["content"], kinds)
        untrained_columns.refuse_placeholder(text, f"turn {number}, of the {message['role']}: ")
    system = _system(row, reading.system) if messages[0]["role"] != "system" else []
    answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
    unlearned = unlearned if learns else frozenset(answers)
    return Conversation(
        messages=[*system, *messages],
        tools=tools_of(row),
        unlearned=frozenset(index + len(system) for index in unlearned),
        images=media.single(found["images"]),
        videos=found["videos"],
    )


def _from_pair(row: Row) -> tuple[list[Message], frozenset[int]]:
    """Returns the conversation of a question and its answer; instruction and input are joined by a line break.

    Source: LLaMA-Factory data/converter.py: AlpacaDatasetConverter.
    """
    question, answer = _pair(row) or next((pair for pair in _PAIRS if pair[0] in row), _PAIRS[0])
    if isinstance(row.get(question), list):
        return _from_lists(row, question, answer)
    messages: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise InvalidConfig(f'"history" is {shown(history)}; it must be a list of [question, answer] pairs')
    for number, pair in enumerate(history, start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise InvalidConfig(f'"history" {number} is {shown(pair)}; it must be a [question, answer] pair')
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    has_input = question == "instruction" and row.get("input") is not None
    parts = [string(row, question), string(row, "input") if has_input else ""]
    asked = "\n".join(part for part in parts if part)
    if not asked:
        raise InvalidConfig(f'"{question}" is empty')
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": string(row, answer)}]
    return messages, frozenset()


def _from_lists(row: Row, question: str, answer: str) -> tuple[list[Message], frozenset[int]]:
    """Returns the conversation of two lists of turns, of which only the second one carries loss.

    Source: TRL's conversational prompt-completion format.
    """
    asked, _ = parse(row[question], question)
    answered, unlearned = parse(row.get(answer), answer)
    earlier = (index for index, message in enumerate(asked) if message["role"] == "assistant")
    messages = [*asked, *answered]
    _require_answer(messages, answer)
    return messages, frozenset([*earlier, *(index + len(asked) for index in unlearned)])


def _from_turns(row: Row) -> tuple[list[Message], frozenset[int]]:
    column = _turns_column(row)
    if column is None:
        raise InvalidConfig('"messages" is missing')
    messages, unlearned = parse(masked(row[column], row.get("loss_mask"), column), column)
    _require_answer(messages, column)
    return messages, unlearned


def _require_answer(messages: list[Message], column: str) -> None:
    if messages[-1]["role"] != "assistant":
        raise InvalidConfig(
            f'"{column}" ends with the {messages[-1]["role"]}; the last turn must be the assistant\'s',
            hint="Remove the turns after the last answer.",
        )


def _system(row: Row, default: str | None) -> list[Message]:
    text = default if row.get("system") in (None, "") else string(row, "system")
    return [{"role": "system", "content": text}] if text else []
