"""Messages in the forms that only some chat templates take: images as parts, arguments of calls as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dstrain.facts.data import images


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message as templates of vision-language models take it: a list of parts if it has images."""
    text, *rest = images.split(message["content"])
    if not rest:
        return message
    parts: list[dict[str, str]] = [{"type": "text", "text": text}]
    for piece in rest:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


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
