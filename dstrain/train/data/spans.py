"""Finds the spans of messages in the output of a chat template, by marking each one and locating the marks.

A template is a program: its text before, in and after a message depends on the other messages. Without its marks
the text must equal the output for the conversation itself. Some templates take media as parts, or arguments as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data import media

Messages = Sequence[Mapping[str, Any]]
Places = dict[int, int]
Template = Callable[..., list[str]]
"""Renders each of several conversations; with `prompt=True` followed by the generation prompt."""

_FIRST_MARK, _LAST_MARK = 0x10A000, 0x10FFFD
_MARK = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])")

OTHER_TEMPLATE = "Write a template with {% generation %} around the answers, and set chat_template: FILE"
"""The hint if answers cannot be located in a template's output."""


def whole(template: Template, messages: Messages) -> tuple[str, Places, int]:
    """Returns the whole conversation, its places, and how many system prompts it lacks.

    Where a finished conversation lacks the system prompt, which Mistral's templates put into a question that nothing
    follows, the text up to the last answer is the one that prompts for it.
    """
    marked, plain = template(_marked(messages), messages)
    text, places = _unmarked(marked)
    if text != plain:
        raise cannot_follow("changes this conversation if a message is longer")
    lost = [mark for index, message in enumerate(messages) for mark in _marks(message, index) if mark not in places]
    asked = 2 * len(messages) - 3
    if lost and asked in places:
        prompt, prompt_places = placed(template, messages[:-1], prompt=True)
        if asked in prompt_places and prompt_places.keys() >= set(lost):
            shift = prompt_places[asked] - places[asked]
            later = {mark: place + shift for mark, place in places.items() if place > places[asked]}
            return prompt[: prompt_places[asked]] + text[places[asked] :], later | prompt_places, 0
    for mark in lost:
        if messages[mark // 2].get("tool_calls"):
            raise cannot_follow(f"omits the tool calls of message {mark // 2 + 1} or the text beside them")
        if messages[mark // 2]["role"] != "system":
            raise cannot_follow(f"omits message {mark // 2 + 1} or a part of it")
    return text, places, len(lost)


class Skeletons:
    """The text of a template around messages, learned once from conversations of one letter per message.

    A conversation of the same roles that is rendered as its messages between the same pieces needs no marks.
    """

    def __init__(self, template: Template) -> None:
        """`template` renders conversations without tools."""
        self._template = template
        self._pieces: dict[tuple[str, ...], list[str]] = {}

    def whole(self, messages: Messages) -> tuple[str, Places, int]:
        """Returns the result of `whole`, in most cases after a single rendering."""
        roles = tuple(message["role"] for message in messages)
        if not all(map(_is_plain, messages)) or not (pieces := self._around(roles)):
            return whole(self._template, messages)
        (text,) = self._template(messages)
        places: Places = {}
        expected = ""
        for index, (piece, message) in enumerate(zip(pieces, messages, strict=False)):
            start, end = len(expected) + len(piece), len(expected) + len(piece) + len(message["content"])
            expected += piece + message["content"]
            places |= {mark: end if mark % 2 else start for mark in _marks(message, index)}
        if text == expected + pieces[-1]:
            return text, places, 0
        self._pieces[roles] = []  # the template depends on what messages say
        return whole(self._template, messages)

    def _around(self, roles: tuple[str, ...]) -> list[str]:
        """Returns the text before each message and after the last one; nothing if it is not known."""
        if roles not in self._pieces:
            try:
                text, places, num_lost = whole(self._template, [{"role": role, "content": "a"} for role in roles])
                ends = [places[2 * index + 1] for index in range(len(roles))]
                pieces = [text[end : next_end - 1] for end, next_end in zip([0, *ends], ends, strict=False)]
                is_known = not num_lost and "a".join([*pieces, ""]) == text[: ends[-1]]
                self._pieces[roles] = [*pieces, text[ends[-1] :]] if is_known else []
            except Exception:  # the conversation itself says what is wrong
                self._pieces[roles] = []
        return self._pieces[roles]


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Returns whether a message is a text without white space around it, and nothing else."""
    content = message["content"]
    return len(message) == 2 and bool(content) and not content[0].isspace() and not content[-1].isspace()


def placed(template: Template, messages: Messages, *, prompt: bool = False) -> tuple[str, Places]:
    """Returns the template's output and the places of messages: answer i starts at 2 i, message i ends at 2 i + 1."""
    (text,) = template(_marked(messages), prompt=prompt)
    return _unmarked(text)


def _unmarked(marked: str) -> tuple[str, Places]:
    """Returns a text without the marks, and their places: of a start the first place, of an end the last one."""
    pieces = _MARK.split(marked)
    places: Places = {}
    place = 0
    for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        number = ord(mark) - _FIRST_MARK
        places[number] = place if number % 2 else places.get(number, place)
    return "".join(pieces[::2]), places


def _marks(message: Mapping[str, Any], index: int) -> Sequence[int]:
    """Returns the marks of a message; an empty one has none but a question: templates ask whether it is empty.

    Of a message with calls it is the start of its text, or of the first call's name without text.
    """
    if message.get("tool_calls"):
        return (2 * index,)
    if message["role"] == "user":
        return (2 * index + 1,)
    return range(2 * index + (message["role"] != "assistant"), 2 * index + 2) if message["content"].strip() else ()


def _marked(messages: Messages) -> Messages:
    """Returns the messages with their marks, within the white space around them, which templates strip."""
    marked = []
    for index, message in enumerate(messages):
        content = message["content"]
        if message.get("tool_calls"):
            marked.append(_with_marked_calls(message, chr(_FIRST_MARK + 2 * index), chr(_FIRST_MARK + 2 * index + 1)))
            continue
        start, end = len(content) - len(content.lstrip()), len(content.rstrip())
        for mark in reversed(_marks(message, index)):
            place = end if mark % 2 else start
            content = f"{content[:place]}{chr(_FIRST_MARK + mark)}{content[place:]}"
        marked.append({**message, "content": content})
    return marked


def _with_marked_calls(message: Mapping[str, Any], start: str, end: str) -> Mapping[str, Any]:
    """Returns a message with calls with its marks: the start of its text or else of the first name, and the ends.

    The text and every string in the arguments have an end. A name has none: results of tools repeat it.
    """
    content = message["content"]
    has_text = bool(content.strip())
    functions = [call["function"] for call in message["tool_calls"]]
    functions = [{**function, "arguments": _ended(function["arguments"], end)} for function in functions]
    if has_text:
        content = f"{_space(content)}{start}{content.strip()}{end}{content[len(content.rstrip()) :]}"
    else:
        functions[0]["name"] = start + functions[0]["name"]
    calls = [{**call, "function": one} for call, one in zip(message["tool_calls"], functions, strict=True)]
    return {**message, "content": content, "tool_calls": calls}


def _space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _ended(value: Any, end: str) -> Any:
    """Returns a value with a mark at the end of every string in it."""
    if isinstance(value, Mapping):
        return {key: _ended(item, end) for key, item in value.items()}
    if isinstance(value, list):
        return [_ended(item, end) for item in value]
    return value.rstrip() + end + value[len(value.rstrip()) :] if isinstance(value, str) else value


def cannot_follow(what: str) -> InvalidConfig:
    return InvalidConfig(f"the chat template {what}, so answers cannot be located", hint=OTHER_TEMPLATE)


_PROBE = "probe"


def with_parts(message: Mapping[str, Any], *, always: bool = False) -> Mapping[str, Any]:
    """Returns a message as templates of vision-language models take it: a list of parts if it has images or videos.

    `always`: whether other messages are lists, too.
    """
    pieces = media.split(message["content"])
    if not (len(pieces) > 1 or always):
        return message
    parts = [{"type": piece} if index % 2 else {"type": "text", "text": piece} for index, piece in enumerate(pieces)]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def takes_only_parts(tokenizer: Any) -> bool:
    """Returns whether the chat template of a tokenizer writes a text only if it is a part of a list.

    The templates of LLaVA-OneVision, Idefics 3 and SmolVLM do, and omit other texts.
    """
    return _only_parts(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _only_parts(tokenizer: Any, template: str) -> bool:
    """Returns the same; `template` is the tokenizer's, which jobs and tests replace."""
    question = {"role": "user", "content": _PROBE}

    def writes(message: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # a template is a program of the model's author and may raise anything
            return False

    return not writes(question) and writes(with_parts(question, always=True))


def with_arguments(render: Callable[[list[list[Any]]], Any], chats: list[list[Any]]) -> Any:
    """Returns `render` of conversations; the arguments of calls become JSON text for templates that join them as such.

    The templates of DeepSeek-V3 and -R1 do; `tojson` in others would make a string of them.
    """
    try:
        return render(chats)
    except TypeError:
        if not any(message.get("tool_calls") for messages in chats for message in messages):
            raise
    return render([[_with_text_arguments(message) for message in messages] for messages in chats])


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    written = [{**function, "arguments": text} for function, text in zip(functions, texts, strict=True)]
    calls = [{**call, "function": one} for call, one in zip(message["tool_calls"], written, strict=True)]
    return {**message, "tool_calls": calls}
