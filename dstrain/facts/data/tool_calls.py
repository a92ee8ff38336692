"""Parses tools and tool calls, as OpenAI, ShareGPT and ms-swift write them, into the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.facts.data.row_values import is_given, shown

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
