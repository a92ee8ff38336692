"""The formats of training data: the columns of each, and its rows as conversations, texts or pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

from dstrain.choices import Column, DataFormat
from dstrain.errors import InvalidConfig, located, nearest
from dstrain.facts.data import media
from dstrain.facts.data.columns import (
    KINDS,
    MEDIA_COLUMNS,
    UNTRAINED_COLUMNS,
    UNTRAINED_MASKS,
    UNTRAINED_MEDIA,
    is_given,
    refuse,
    refuse_name,
    refuse_placeholder,
    shown,
    string,
)
from dstrain.facts.data.turns import (
    TOOL_COLUMNS,
    Conversation,
    Message,
    carries_loss,
    masked,
    parse,
    role_of,
    tools_of,
    unused_keys,
)

Row = Mapping[str, Any]

_TURNS = ("messages", "conversations")
"""Columns with the turns of a conversation; the second name is ShareGPT's."""
SIDES = ("chosen", "rejected")
"""Columns of the two answers of a pair."""
_PROMPTS = ("prompt", "question", *_TURNS)
"""Columns with the prompt of a pair: a text, or turns. One of them is read, or the columns of an instruction."""
_BESIDE = ("system", "weight", *TOOL_COLUMNS, *MEDIA_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns of a format."""

    needs: str
    """Its columns, in words."""
    columns: tuple[tuple[str, ...], ...]
    """Columns that go together; a row has one of these groups, and the first one that is whole is read."""
    beside: tuple[str, ...]
    """Columns that are read beside them."""

    def read(self, columns: Iterable[str]) -> tuple[str, ...] | None:
        """Returns the first group of columns that is whole, or None."""
        names = set(columns)
        return next((group for group in self.columns if names.issuperset(group)), None)


FORMATS: Mapping[DataFormat, Format] = MappingProxyType(
    {
        DataFormat.ALPACA: Format(
            needs="instruction and output (optionally input, system, history), prompt and completion, "
            "prompt and response, query and response, or question and answer (optionally images, videos)",
            columns=(
                ("instruction", "output"),  # Stanford Alpaca
                ("prompt", "completion"),  # TRL
                ("prompt", "response"),
                ("query", "response"),  # ms-swift
                ("question", "answer"),
            ),
            beside=("history", *_BESIDE),
        ),
        DataFormat.MESSAGES: Format(
            needs="messages or conversations (optionally system, tools, images, videos)",
            columns=tuple((name,) for name in _TURNS),
            beside=("loss_mask", *_BESIDE),
        ),
        DataFormat.TEXT: Format(needs="text", columns=(("text",),), beside=("weight",)),
        DataFormat.PREFERENCE: Format(
            needs="chosen and rejected, each an answer or a conversation that ends with it, and with answers their "
            "prompt (or question, instruction and input, messages, conversations; optionally system, tools)",
            columns=(SIDES,),
            beside=_BESIDE,
        ),
    }
)
_NEEDED = frozenset(name for one in FORMATS.values() for group in one.columns for name in group)
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
    kind, given = FORMATS[data_format], [name for name, value in row.items() if value is not None]
    used = {*(kind.read(given) or ()), *kind.beside}
    if data_format is DataFormat.PREFERENCE:
        of_alpaca = ["instruction", "input", "history"] if "instruction" in given else []
        used.update(of_alpaca or [name for name in _PROMPTS if name in given][:1])
    elif "instruction" in used:
        used.add("input")
    return used


def _turns_column(row: Row) -> str | None:
    return next((name for name in _TURNS if row.get(name) is not None), None)


def detect(columns: Iterable[str]) -> DataFormat:
    """Returns the format of the columns; a conversation takes precedence over a pair, and a pair over a text.

    >>> detect(["instruction", "input", "output", "text"]).value
    'alpaca'

    Raises InvalidConfig with the columns and those that each format needs.
    """
    names = list(columns)
    for data_format in (DataFormat.MESSAGES, DataFormat.ALPACA, DataFormat.TEXT):
        if FORMATS[data_format].read(names):
            return data_format
    for column in names:
        refuse_name(column)
    needs = "; ".join(f"{data_format.value} needs {kind.needs}" for data_format, kind in FORMATS.items())
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
    if not FORMATS[reading.format].read(names):
        raise InvalidConfig(
            f"the format {reading.format.value} needs {FORMATS[reading.format].needs}; "
            f"the columns are {_listed(names)}",
            hint="Change task or data_format, or name the columns in the job: columns: {NAME: YOUR_COLUMN}.",
        )
    return reading


def _listed(columns: list[str]) -> str:
    return ", ".join(columns) if columns else "(none)"


def to_sample(row: Row, reading: Reading) -> Conversation | str:
    """Returns the conversation of a row, which ends with the assistant, or its text if the format is `text`.

    >>> to_sample({"instruction": "Add.", "input": "1 + 1", "output": "2"}, Reading(format=DataFormat.ALPACA)).messages
    [{'role': 'user', 'content': 'Add.\\n1 + 1'}, {'role': 'assistant', 'content': '2'}]

    Raises InvalidConfig without a place; the caller adds file and line.
    """
    row = reading.row(row)
    refuse(row, UNTRAINED_COLUMNS)
    if reading.format is not DataFormat.MESSAGES:
        refuse(row, UNTRAINED_MASKS)
    learns = carries_loss(row.get("weight"), '"weight"')
    if reading.format is DataFormat.TEXT:
        refuse(row, UNTRAINED_MEDIA)
        if not learns:
            raise InvalidConfig('"weight" is 0, and a text has no other part', hint="Remove the row.")
        return string(row, "text")
    messages, unlearned = _from_pair(row) if reading.format is DataFormat.ALPACA else _from_turns(row)
    messages, found = media.attach(row, messages)
    kinds = [kind for kind in KINDS if found[kind.columns[0]]]
    for number, message in enumerate(messages, start=1):
        text = media.without_marks(message["content"], kinds)
        refuse_placeholder(text, f"turn {number}, of the {message['role']}: ")
    system = _system(row, reading.system) if messages[0]["role"] != "system" else []
    answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
    unlearned = unlearned if learns else frozenset(answers)
    return Conversation(
        messages=[*system, *messages],
        tools=tools_of(row),
        # the system message moves all turns on by one
        unlearned=frozenset(index + len(system) for index in unlearned),
        images=media.single(found["images"]),
        videos=found["videos"],
    )


def _from_pair(row: Row) -> tuple[list[Message], frozenset[int]]:
    """Returns the conversation of a question and its answer; instruction and input are joined by a line break.

    Source: LLaMA-Factory data/converter.py: AlpacaDatasetConverter.
    """
    pairs = FORMATS[DataFormat.ALPACA]
    question, answer = pairs.read(row) or next((pair for pair in pairs.columns if pair[0] in row), pairs.columns[0])
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


_BESIDE_ANSWER = ("instruction", "input", "history", *_BESIDE)
_NOT_READ = {name: kind for name, kind in UNTRAINED_COLUMNS.items() if name not in SIDES} | UNTRAINED_MASKS


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
        raise InvalidConfig(f'"{missing[0]}" is missing; a pair needs {FORMATS[DataFormat.PREFERENCE].needs}')
    refuse(row, _NOT_READ)
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
        prompt, beside = _prompt(row), {key: row.get(key) for key in _BESIDE}
        turns = answer if len(answer) > 1 else [*prompt, *answer]
        found = _conversation({**beside, "messages": turns}, reading, DataFormat.MESSAGES)
        if len(answer) > 1 and prompt:
            unanswered = [*prompt, {"role": "assistant", "content": ""}]
            _require_beginning(_conversation({**beside, "messages": unanswered}, reading, DataFormat.MESSAGES), found)
        elif not any(message["role"] == "user" for message in found.messages):
            raise InvalidConfig("has no question", hint=f"A pair needs {FORMATS[DataFormat.PREFERENCE].needs}.")
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
    column = next((name for name in _PROMPTS if row.get(name) is not None), None)
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
