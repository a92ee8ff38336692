"""Parses the turns of a conversation: roles, texts, thoughts, tools and their calls, and which answers carry loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dstrain.errors import InvalidConfig, nearest
from dstrain.facts.data import media
from dstrain.facts.data.columns import KINDS, UNTRAINED_KEYS, is_given, refuse, shown, string
from dstrain.facts.data.media import Files

_CALL = '{"name": …, "arguments": {…}}'
TOOL_COLUMNS = ("tools", "functions")
"""Columns that describe tools; the second name is OpenAI's former one."""


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the tools of a row as `{"type": "function", "function": {…}}` each, or None if it has none.

    A column is a list, or JSON text with one (LLaMA-Factory, ms-swift). Raises InvalidConfig.
    """
    column = next((name for name in TOOL_COLUMNS if is_given(row.get(name))), None)
    if column is None:
        return None
    value = _parsed(row[column], f'"{column}"')
    if not isinstance(value, list):
        raise InvalidConfig(f'"{column}" is {shown(value)}; it must be a list of tools')
    return [_tool(_parsed(tool, f'"{column}" {n}'), f'"{column}" {n}') for n, tool in enumerate(value, start=1)] or None


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        return {"type": "function", **tool}
    if isinstance(tool, Mapping) and isinstance(tool.get("name"), str):
        return {"type": "function", "function": dict(tool)}
    raise InvalidConfig(f'{place} is {shown(tool)}; a tool must be {{"type": "function", "function": {{…}}}}')


def calls_of_turn(turn: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Returns the calls of an assistant's turn in OpenAI's form: `tool_calls`, or the former `function_call`."""
    if is_given(turn.get("tool_calls")):
        calls = _parsed(turn["tool_calls"], f"{place}: tool_calls")
        if not isinstance(calls, list):
            raise InvalidConfig(f"{place}: tool_calls is {shown(calls)}; it must be a list")
        return [_call(call, f"{place}: tool_calls {number}") for number, call in enumerate(calls, start=1)]
    if is_given(turn.get("function_call")):
        return [_call(_parsed(turn["function_call"], f"{place}: function_call"), f"{place}: function_call")]
    return []


def calls_of_text(text: str, place: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns the thoughts that precede calls, and the calls, of a `function_call` or `tool_call` turn.

    >>> calls_of_text('<think>Hm.</think>{"name": "now", "arguments": {}}', "turn 2")
    ('<think>Hm.</think>', [{'type': 'function', 'function': {'name': 'now', 'arguments': {}}}])

    Source: LLaMA-Factory data/formatter.py: FunctionFormatter (a call, or a list of calls, as JSON).
    """
    thoughts, tag, rest = text.rpartition("</think>")
    calls = _parsed(rest, place)
    calls = calls if isinstance(calls, list) else [calls]
    return thoughts + tag, [_call(call, place) for call in calls]


def _call(call: Any, place: str) -> dict[str, Any]:
    """Returns a call as chat templates take it: `type` and `function` with a name and arguments as an object."""
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function") if isinstance(outer.get("function"), Mapping) else outer
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidConfig(f"{place} is {shown(call)}; a call must be {_CALL}")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = _parsed(arguments, f"{place}: arguments") if is_given(arguments) else {}
    if not isinstance(arguments, Mapping):
        raise InvalidConfig(f"{place}: arguments is {shown(arguments)}; it must be an object")
    identity = {"id": outer["id"]} if is_given(outer.get("id")) else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": dict(arguments)}}


def _parsed(value: Any, place: str) -> Any:
    """Returns a value that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        raise InvalidConfig(f"{place} is {shown(value)}; it must be JSON") from None


Row = Mapping[str, Any]
Message = dict[str, Any]
"""A message as chat templates take it: `role` and `content`, if given `reasoning_content`, `tool_calls`, `name`.

Images and videos are marks in `content`."""

_CALLS = "calls"
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
        "tool": "tool",
        "function": "tool",
        "observation": "tool",
        "tool_response": "tool",
        "function_call": _CALLS,
        "tool_call": _CALLS,
    }
)
"""Speaker, as OpenAI, ShareGPT or ms-swift name it → role in chat templates; `calls`: an assistant's calls as JSON."""

_LOSS_KEYS = ("weight", "loss", "loss_mask", "train", "training")
"""Whether a turn carries loss: OpenAI (`weight`), ms-swift (`loss`), axolotl (`train`, `training`)."""
_TURN_LOSS = frozenset({*_LOSS_KEYS, "mask"})
"""Keys of a turn that say whether it carries loss."""
USED = frozenset({"role", "content", "from", "value", "reasoning_content", "tool_calls", "function_call"}) | _TURN_LOSS
"""Keys of a turn that are read."""
_USED_OF_TOOLS = ("name", "tool_call_id")
"""Keys that are read in the result of a tool."""
_TRAINS_ANY = ("train", "training")
"""Keys that axolotl applies to the turns of all roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One sample as messages."""

    messages: Sequence[Message]
    """They end with the assistant."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Descriptions of tools for the chat template, in OpenAI's form."""
    unlearned: frozenset[int] = field(default_factory=frozenset)
    """Indices of answers that carry no loss, by their weight."""
    images: tuple[str, ...] = ()
    """Files of the images, in the order of their marks."""
    videos: tuple[Files, ...] = ()
    """Files of the videos, each one file or one per frame, in the order of their marks."""

    @property
    def has_media(self) -> bool:
        """Whether it has images or videos."""
        return bool(self.images or self.videos)

    @property
    def media(self) -> tuple[str, ...]:
        """The columns of what it has of images and videos."""
        return tuple(kind.columns[0] for kind in KINDS if getattr(self, kind.columns[0]))


def parse(turns: Any, name: str) -> tuple[list[Message], frozenset[int]]:
    """Returns the messages of a list of turns, and the indices of those that carry no loss by their own weight.

    `name` is the column's. Calls in consecutive turns become one message. Images and videos that
    are parts of a turn stand under their column's name in its message, see `media.attach`. Raises InvalidConfig.
    """
    if not isinstance(turns, list):
        raise InvalidConfig(f'"{name}" is {shown(turns)}; it must be a list of turns')
    if not turns:
        raise InvalidConfig(f'"{name}" is empty')
    messages: list[Message] = []
    unlearned = set()
    is_after_calls = False
    for number, turn in enumerate(turns, start=1):
        place = f"{name} {number}"
        message, is_calls = _turn(turn, place)
        if is_calls and is_after_calls:
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
        is_after_calls = is_calls
        if not _learns(turn, message["role"], place):
            unlearned.add(len(messages) - 1)
    return messages, frozenset(unlearned)


def masked(turns: Any, mask: Any, name: str) -> Any:
    """Returns a list of turns in which each has its entry of a row's mask as `loss_mask`. Raises InvalidConfig.

    A mask has a 0 or 1 for each turn; values of questions are ignored.
    """
    if not is_given(mask):
        return turns
    if not isinstance(mask, list) or not isinstance(turns, list) or len(mask) != len(turns):
        count = len(turns) if isinstance(turns, list) else 0
        raise InvalidConfig(
            f'"loss_mask" is {shown(mask)}, not a list of 0 or 1 for each of the {count} turns of "{name}"',
            hint="Masks of tokens are not trained: tokens are made by the model's own tokenizer.",
        )
    each = zip(turns, mask, strict=True)
    return [{**turn, "loss_mask": entry} if isinstance(turn, Mapping) else turn for turn, entry in each]


def unused_keys(turns: Sequence[Row]) -> list[str]:
    """Returns the keys of turns that have a value but are not read, in order of appearance."""
    names: dict[str, None] = {}
    for turn in turns:
        if turn.keys() <= USED:  # most are
            continue
        read = USED | set(_USED_OF_TOOLS if role_of(turn) == "tool" else ())
        names.update((key, None) for key, value in turn.items() if key not in read and is_given(value))
    return list(names)


def role_of(turn: Row) -> str | None:
    """Returns the role of a turn in chat templates, or None if it is unknown."""
    return ROLES.get(str(turn.get("role") or turn.get("from")))


def carries_loss(value: Any, place: str) -> bool:
    """Returns whether a weight is 1, or not given. Raises InvalidConfig unless it is 0, 1, true or false."""
    if not is_given(value):
        return True
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise InvalidConfig(
            f"{place} is {shown(value)}; a weight must be 0 or 1",
            hint="Fractions of a loss are not trained: repeat a sample, or give its data set a larger weight.",
        )
    return bool(value)


def _learns(turn: Row, role: str, place: str) -> bool:
    if _TURN_LOSS.isdisjoint(turn):
        return True
    for key in _TRAINS_ANY if role != "assistant" else ():
        if is_given(turn.get(key)) and carries_loss(turn[key], f"{place}: {key}"):
            raise InvalidConfig(
                f"{place}: {key} is {shown(turn[key])}, but only answers carry loss; this turn is the {role}'s",
                hint=f"Remove {key} from turns of the {role}, or set loss_on: all.",
            )
    weights = [carries_loss(turn.get(key), f"{place}: {key}") for key in _LOSS_KEYS]
    return all(weights) and turn.get("mask") is not True


def _turn(turn: Any, place: str) -> tuple[Message, bool]:
    """Returns the message of a turn, and whether the turn holds calls as JSON text."""
    if not isinstance(turn, Mapping):
        raise InvalidConfig(f"{place} is {shown(turn)}; a turn must be an object with role and content")
    # ShareGPT has names of its own
    role_key, text_key = ("from", "value") if turn.get("role") is None and "from" in turn else ("role", "content")
    name = string(turn, role_key, place)
    if name not in ROLES:
        near = nearest(name, ROLES)
        raise InvalidConfig(
            f'{place}: {role_key} is "{name}", not system, user (human), assistant (gpt) or tool',
            hint=f'Did you mean "{near}"?' if near else None,
        )
    refuse(turn, UNTRAINED_KEYS, f"{place}: ")
    role = ROLES[name]
    if role == _CALLS:
        content, calls = calls_of_text(_content(turn, text_key, place), place)
        return {"role": "assistant", "content": content, "tool_calls": calls}, True
    calls = calls_of_turn(turn, place)
    if calls and role != "assistant":
        raise InvalidConfig(f"{place}: the {role} calls a tool; only the assistant can")
    # a turn with calls may have no text, as in OpenAI's format
    has_text = not calls or turn.get(text_key) is not None
    message: Message = {"role": role, "content": _content(turn, text_key, place) if has_text else ""}
    if turn.get("reasoning_content") is not None:
        message["reasoning_content"] = string(turn, "reasoning_content", place)
    if calls:
        message["tool_calls"] = calls
    message |= media.of_parts(turn.get(text_key), place)
    if role == "tool":
        message |= {key: turn[key] for key in _USED_OF_TOOLS if is_given(turn.get(key))}
    return message, False


def _content(turn: Row, key: str, place: str) -> str:
    """Returns the text of a turn; the parts of a list are joined, with a mark for each image and video."""
    parts = turn.get(key)
    if not isinstance(parts, list):
        return string(turn, key, place)
    texts = []
    for part in parts:
        kind = media.kind_of(part)
        if kind is not None:
            media.require_plain(part, kind, f"{place}: {key}")
            texts.append(kind.mark)
        elif _is_text_part(part):
            texts.append(part["text"])
        else:
            problem = f"{place}: {key} has parts that are neither text nor an image or a video"
            raise InvalidConfig(f"{problem}, which is not supported")
    return "".join(texts)


def _is_text_part(part: Any) -> bool:
    """Returns whether a part of a turn is text only."""
    is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
    return is_text and part.get("type") in (None, "text", "input_text", "output_text")
