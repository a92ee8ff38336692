"""Messages in the forms that only some chat templates take: media as parts, arguments of calls as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from dstrain.facts.data import media

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

    Those of LLaVA-OneVision, Idefics 3 and SmolVLM do, and say nothing about others.
    """
    return _only_parts(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _only_parts(tokenizer: Any, template: str) -> bool:
    """Returns the same; `template` is that of the tokenizer, which jobs and tests replace."""
    question = {"role": "user", "content": _PROBE}

    def writes(message: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # a template is a program of the model's author and may raise anything
            return False

    return not writes(question) and writes(with_parts(question, always=True))


def with_arguments(render: Callable[[list[list[Any]]], Any], chats: list[list[Any]]) -> Any:
    """Returns `render` of conversations; the arguments of calls become JSON text for templates that join them as such.

    Those of DeepSeek-V3 and -R1 do; `tojson` in others would make a string of them.
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
