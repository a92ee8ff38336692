"""Refuses samples that teach wrong things: text that no tokenizer takes, and answers that were cut while written.

What needs a tokenizer, such as control tokens in a text, is counted where samples become tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dstrain.errors import InvalidConfig, located
from dstrain.facts.data.preferences import Pair
from dstrain.facts.data.turns import Conversation, Message

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NUL = "\\u0000"
_REASONS = ("finish_reason", "finishReason", "stop_reason", "done_reason")
"""Columns, or keys of a turn, with the end of a generation. Source: OpenAI, Gemini, Anthropic, Ollama."""
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "content_filter", "safety", "error"})
_FLAGS = ("truncated", "is_truncated")
_THOUGHT = re.compile(r"\s*(?:<(?P<tag>[\w:|]*(?:think|thought|reason)[\w:|]*)>|\[(?P<mark>THINK)\])", re.IGNORECASE)
"""The beginning of a thought: `<think>`, `<thinking>`, `<seed:think>`, `<reasoning>`, `[THINK]`."""
_CALL = re.compile(r"^\s*<(tool_calls?|function_calls?)>(?!.*</\1>)", re.DOTALL | re.MULTILINE)
_SKIP = "Remove the row, or set on_bad_row: skip to leave such rows out."


def require_sound(sample: Conversation | str | Pair, row: Mapping[str, Any]) -> None:
    """Raises InvalidConfig, without a place, for a sample that cannot be learned from; `row` holds it.

    Answers without loss and rejected ones may be cut: only their text must be whole.
    """
    if isinstance(sample, Pair):
        with located("chosen"):
            require_sound(sample.chosen, {})
        with located("rejected"):
            _require_texts(sample.rejected)
        return
    if isinstance(sample, str):
        _require_text(sample, lambda: iter([("text", sample)]))
        return
    _require_texts(sample)
    if len(sample.unlearned) < sum(message["role"] == "assistant" for message in sample.messages):
        _require_whole_by_name(row)
    for index, message in enumerate(sample.messages):
        if message["role"] == "assistant" and index not in sample.unlearned:
            _require_whole(message, f"turn {index + 1}, of the assistant: ")


def _require_texts(sample: Conversation) -> None:
    """Raises InvalidConfig for characters in a conversation that are none."""
    _require_text([sample.messages, sample.tools], lambda: _strings(sample))


def _require_text(values: Any, strings: Callable[[], Iterator[tuple[str, str]]]) -> None:
    """Raises InvalidConfig for characters that are none; `strings` finds them if there are any."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        for place, string in strings():
            if found := _SURROGATE.search(string):
                half = f"half a character (\\u{ord(found[0]):04x}) at {found.start() + 1}"
                raise InvalidConfig(
                    f"{place}: has {half}, which no tokenizer takes: the text was cut within an emoji or the like",
                    hint=_SKIP,
                ) from None
    if _NUL in text:
        for place, string in strings():
            if "\0" in string:
                raise InvalidConfig(
                    f"{place}: has a NUL character (\\u0000) at {string.index(chr(0)) + 1}, which is no text",
                    hint=_SKIP,
                )


def _strings(sample: Conversation) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of everything in a conversation that a template may write."""
    for number, message in enumerate(sample.messages, start=1):
        for key, value in message.items():
            yield from ((f"turn {number}, {key}", text) for text in _within(value))
    yield from (("tools", text) for text in _within(sample.tools))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _within(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)


def _require_whole_by_name(row: Mapping[str, Any]) -> None:
    """Raises InvalidConfig if a row or its last turn says that the answer was cut."""
    last = [value[-1] for value in row.values() if isinstance(value, list) and value and isinstance(value[-1], Mapping)]
    for holder in (row, *last):
        for name in _REASONS:
            if str(holder.get(name)).lower() in _CUT:
                raise InvalidConfig(
                    f'"{name}" is "{holder[name]}": the answer was cut while it was written', hint=_SKIP
                )
        for name in _FLAGS:
            if holder.get(name) is True:
                raise InvalidConfig(f'"{name}" is true: the answer was cut while it was written', hint=_SKIP)


def _require_whole(message: Message, place: str) -> None:
    """Raises InvalidConfig for an answer that ends within its thoughts or within a call."""
    content, calls = message["content"], message.get("tool_calls")
    if opened := _THOUGHT.match(content):
        closing = f"</{opened['tag']}>" if opened["tag"] else "[/THINK]"
        before, closed, after = content.partition(closing)
        if not closed:
            problem = f"begins thoughts with {opened[0].strip()} and ends without {closing}"
            raise InvalidConfig(f"{place}{problem}: it was cut while it was written", hint=_SKIP)
        thoughts, answer = before[opened.end() :], after
    else:
        thoughts, answer = message.get("reasoning_content", ""), content
    if thoughts.strip() and not answer.strip() and not calls:
        raise InvalidConfig(f"{place}has thoughts but no answer: it was cut while it was written", hint=_SKIP)
    if not calls and (call := _CALL.search(content)):
        raise InvalidConfig(f"{place}ends within a <{call[1]}>: it was cut while it was written", hint=_SKIP)
