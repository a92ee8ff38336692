"""Edits generated files in place and keeps comments and formatting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from dstrain.config import jsonc
from dstrain.config.edits import edit_json
from dstrain.config.jsonc import REMOVED, UNCHANGED, Change, Mark, Pointer, applied, dotted, newline_of, same
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import hostfile
from dstrain.job.file import TEXTS
from dstrain.job.yaml_source import compose_yaml, parse_yaml

_BOM = "\ufeff"
_LINE = re.compile(r"^[ \t]*(?P<host>[^\s#]\S*)[ \t]+slots=(?P<slots>[0-9]+)[ \t]*$")


def read(text: str, name: str) -> Any:
    """Returns the value of a ds_config, a job or a hostfile (slots by host); the suffix of `name` tells the format.

    Raises InvalidConfig with file:line:column if the text is unreadable.

    >>> read("gpu01 slots=8\\n", "hostfile")
    {'gpu01': 8}
    """
    kind = PurePath(name).suffix
    if kind == ".json":
        return jsonc.read(text, name).value
    if kind in (".yaml", ".yml"):
        value = parse_yaml(text, name, texts=TEXTS)[0]
        return {} if value is None else value
    return {host.name: host.slots for host in hostfile.parse(text, name).hosts}


def apply(text: str, name: str, changes: Sequence[Change]) -> str:
    """Returns the text after the changes, which are applied in order; the suffix of `name` tells the format.

    Raises InvalidConfig if the text is unreadable, or if a value cannot be changed in place, such as a YAML anchor that
    two keys share: the result is read again and compared.
    """
    if not changes:
        return text
    expected = applied(read(text, name), changes)
    try:
        edited = _edited(text, name, changes)
        is_right = same(read(edited, name), expected)
    except InvalidConfig:
        is_right = False
    if not is_right:
        keys = ", ".join(dict.fromkeys(dotted(change.pointer) for change in changes))
        raise InvalidConfig(
            f"{name}: {keys} cannot be changed without changing other keys",
            hint="Remove anchors and unusual syntax from the file, or let dstrain replace the file with --force.",
        )
    return edited


def _edited(text: str, name: str, changes: Sequence[Change]) -> str:
    kind = PurePath(name).suffix
    if kind == ".json":
        return edit_json.apply(text, name, changes)
    if kind in (".yaml", ".yml"):
        bom = _BOM if text.startswith(_BOM) else ""
        return bom + apply_yaml(text.removeprefix(_BOM), name, changes)
    return _hosts_edited(text, changes)


def _hosts_edited(text: str, changes: Sequence[Change]) -> str:
    """Returns a hostfile after the changes: the key is a host's name, the value its slots.

    >>> _hosts_edited("# two\\na slots=8\\nb slots=8\\n", [Change(pointer=("b",), value=4)])
    '# two\\na slots=8\\nb slots=4\\n'
    """
    for change in changes:
        text = _host_edited(text, change)
    return text


def _host_edited(text: str, change: Change) -> str:
    host = str(change.pointer[0])
    lines = text.splitlines(keepends=True)
    matches = {
        match["host"]: (at, match) for at, line in enumerate(lines) if (match := _LINE.match(line.rstrip("\r\n")))
    }
    if host not in matches:
        places = {name: at for name, (at, _) in matches.items()}
        return _host_added(text, lines, places, change) if not isinstance(change.value, Mark) else text
    at, match = matches[host]
    if change.value is REMOVED:
        return "".join(lines[:at] + lines[at + 1 :])
    line = lines[at]
    if change.value is not UNCHANGED:
        line = line[: match.start("slots")] + str(change.value) + line[match.end("slots") :]
    if change.renamed is not None:
        line = line[: match.start("host")] + change.renamed + line[match.end("host") :]
    lines[at] = line
    return "".join(lines)


def _host_added(text: str, lines: list[str], places: dict[str, int], change: Change) -> str:
    newline = newline_of(text)
    order = list(places) if change.after is None else [host for host in change.after if host in places]
    # the first host runs rank 0: only a host that is generated first goes before it
    otherwise = len(lines) if change.after else min(places.values(), default=len(lines))
    at = places[order[-1]] + 1 if order else otherwise
    if at > 0 and not lines[at - 1].endswith("\n"):
        lines[at - 1] += newline
    return "".join([*lines[:at], f"{change.pointer[0]} slots={change.value}{newline}", *lines[at:]])


_COMMENT = re.compile(r"([ \t]+)#[ \t]?([^\r\n]*)")
_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_][\w-]*", re.IGNORECASE)
_GAP = re.compile(r"(?:[ \t\r\n]+|(?<=\s)#[^\n]*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Offsets of one key and its value."""

    key: int
    """The start of the key."""
    key_end: int
    """One past the key."""
    colon: int
    """One past the colon."""
    start: int
    """The start of the value; `colon` for an empty value, which is null."""
    end: int
    """One past the last character of the value."""
    is_block: bool
    """Whether the value is a mapping or a list in block style, without brackets."""
    is_in_braces: bool
    """Whether the key is in a mapping in flow style."""


def apply_yaml(text: str, name: str, changes: Sequence[Change]) -> str:
    """Returns the text, which has no BOM, after the changes, which are applied in order.

    >>> apply_yaml("a: 1  # one\\nb: 2\\n", "job.yaml", [Change(pointer=("a",), value=3, comment="three")])
    'a: 3  # three\\nb: 2\\n'
    """
    for change in changes:
        text = _changed(text, name, change)
    return text


def comments(text: str) -> dict[Pointer, str]:
    """Returns the comment at the end of each key's line, without `#`.

    >>> comments("a: 1  # one\\nb: # two\\n  c: 3\\n")
    {('a',): 'one', ('b',): 'two'}
    """
    matches = {pointer: _comment(text, member) for pointer, member in members(text).items()}
    return {pointer: match[2].strip() for pointer, match in matches.items() if match is not None}


def members(text: str) -> dict[Pointer, Member]:
    """Returns the offsets of every mapping key in a text, in its order; lists are values."""
    node = compose_yaml(text)
    return dict(_members(text, node, ())) if isinstance(node, MappingNode) else {}


def _members(text: str, node: MappingNode, pointer: Pointer) -> Iterator[tuple[Pointer, Member]]:
    for key, value in node.value:
        here = (*pointer, str(key.value))
        yield here, _member(text, key, value, is_in_braces=bool(node.flow_style))
        if isinstance(value, MappingNode) and value.start_mark.index >= key.end_mark.index:
            yield from _members(text, value, here)


def _member(text: str, key: Node, value: Node, *, is_in_braces: bool) -> Member:
    key_end = key.end_mark.index
    colon = text.find(":", key_end) + 1
    alias = re.compile(r"[ \t]*(\*[^\s,\]}]+)").match(text, colon)
    is_block = isinstance(value, (MappingNode, SequenceNode)) and not value.flow_style
    start, end = value.start_mark.index, _end(text, value)
    if alias:
        start, end, is_block = alias.start(1), alias.end(1), False
    elif start == end or start < colon:
        start = end = colon
    return Member(
        key=key.start_mark.index,
        key_end=key_end,
        colon=colon,
        start=start,
        end=end,
        is_block=is_block,
        is_in_braces=is_in_braces,
    )


def _end(text: str, node: Node) -> int:
    """Returns the end of a value, without the comments and blank lines that the parser includes."""
    if isinstance(node, ScalarNode) and node.style in ("|", ">"):
        whole = text[node.start_mark.index : node.end_mark.index]
        return int(node.start_mark.index + len(whole.rstrip()))
    if isinstance(node, MappingNode) and not node.flow_style and node.value:
        return _member(text, *node.value[-1], is_in_braces=False).end
    if isinstance(node, SequenceNode) and not node.flow_style and node.value:
        return _end(text, node.value[-1])
    return int(node.end_mark.index)


def _comment(text: str, member: Member) -> re.Match[str] | None:
    """Returns the comment at the end of a member's line; if the value is a block, of the key's line."""
    if member.is_in_braces:
        return None
    return _COMMENT.match(text, member.colon if member.is_block else member.end)


def _changed(text: str, name: str, change: Change) -> str:
    known = members(text)
    pointer = change.pointer
    if change.value is REMOVED:
        return _removed(text, known, pointer) if pointer in known else text
    if change.value is not UNCHANGED:
        if not pointer:
            raise InvalidConfig(f"{name} is not a mapping of keys, so it cannot be edited")
        replaced = pointer in known
        text = _replaced(text, known[pointer], change.value) if replaced else _added(text, name, known, change)
    if change.comment is not None:
        member = members(text).get(pointer)
        text = text if member is None else _commented(text, member, change.comment)
    if change.renamed is not None and (member := members(text).get(pointer)) is not None:
        text = text[: member.key] + _key(change.renamed) + text[member.key_end :]
    return text


def _commented(text: str, member: Member, comment: str) -> str:
    """Returns the text with another comment at the end of a member's line; "" removes it."""
    match = _comment(text, member)
    if member.is_in_braces:
        return text
    at = member.colon if member.is_block else member.end
    start, end = (match.start(), match.end()) if match else (at, at)
    new = f"{match[1] if match else '  '}# {comment}" if comment else ""
    return text[:start] + new + text[end:]


def _replaced(text: str, member: Member, value: Any) -> str:
    """Returns the text with another value on the key's line; a comment between the two moves after the value."""
    new = json.dumps(value, ensure_ascii=False)
    if not member.is_block:
        lead = " " if member.start == member.colon else ""
        return text[: member.start] + lead + new + text[member.end :]
    between = text[member.colon : member.start]
    return text[: member.colon] + " " + new + between.rstrip() + text[member.end :]


def _removed(text: str, known: Mapping[Pointer, Member], pointer: Pointer) -> str:
    """Returns the text without a key; a comment at the end of its line becomes a separate line."""
    member = known[pointer]
    if member.is_in_braces:
        return _removed_in_braces(text, member)
    siblings = [path for path in known if path[:-1] == pointer[:-1]]
    if len(siblings) == 1 and pointer[:-1]:
        return _replaced(text, known[pointer[:-1]], {})
    start = text.rfind("\n", 0, member.key) + 1
    match = _comment(text, member)
    newline = text.find("\n", member.end)
    end = len(text) if newline < 0 else newline + 1
    kept = f"{text[start : member.key]}{match[0].lstrip()}{newline_of(text)}" if match else ""
    return text[:start] + kept + text[end:]


def _removed_in_braces(text: str, member: Member) -> str:
    match = _GAP.match(text, member.end)
    after = match.end() if match else member.end
    if text[after : after + 1] == ",":
        blanks = len(text[after + 1 :]) - len(text[after + 1 :].lstrip(" "))
        return text[: member.key] + text[member.end : after].strip(" ") + text[after + 1 + blanks :]
    before = text[: member.key].rstrip()
    return (before[:-1] if before.endswith(",") else text[: member.key]) + text[member.end :]


def _added(text: str, name: str, known: Mapping[Pointer, Member], change: Change) -> str:
    """Returns the text with a key added, including missing mappings around it."""
    parent, key, value, after = change.pointer[:-1], change.pointer[-1], change.value, change.after
    while parent and parent not in known:
        value, key, parent, after = {key: value}, parent[-1], parent[:-1], None
    inner = {str(path[-1]): member for path, member in known.items() if path[:-1] == parent}
    order = list(inner) if after is None else [sibling for sibling in after if sibling in inner]
    neighbour = inner[order[-1]] if order else None
    if parent and not known[parent].is_block:
        entry = f"{_key(key)}: {json.dumps(value, ensure_ascii=False)}"
        return _added_in_braces(text, name, known[parent], neighbour, entry)
    newline = newline_of(text)
    if neighbour is not None:
        lines = _lines(key, value, _column(text, neighbour.key), newline)
        return _after_line(text, neighbour.end, lines, newline)
    if inner:
        first = next(iter(inner.values())).key
        start = text.rfind("\n", 0, first) + 1
        return text[:start] + _lines(key, value, first - start, newline) + newline + text[start:]
    return _after_line(text, len(text), _lines(key, value, 0, newline), newline)


def _after_line(text: str, at: int, lines: str, newline: str) -> str:
    """Returns the text with lines after the line of an offset."""
    end = text.find("\n", at) + 1
    if end > 0:
        return text[:end] + lines + newline + text[end:]
    return text + (newline if text and not text.endswith("\n") else "") + lines + newline


def _added_in_braces(text: str, name: str, parent: Member, neighbour: Member | None, entry: str) -> str:
    if text[parent.start : parent.start + 1] != "{":
        raise InvalidConfig(f"{name}: {text[parent.key : parent.key_end]} is not a mapping")
    if neighbour is not None:
        return text[: neighbour.end] + ", " + entry + text[neighbour.end :]
    at = parent.start + 1
    is_empty = not text[at : parent.end - 1].strip()
    return text[:at] + entry + ("" if is_empty else ", ") + text[at:]


def _lines(key: Any, value: Any, column: int, newline: str) -> str:
    """Returns a key and its value: a mapping on several lines, everything else on one."""
    lead = " " * column + _key(key) + ":"
    if isinstance(value, Mapping) and value:
        inner = [_lines(name, item, column + 2, newline) for name, item in value.items()]
        return newline.join([lead, *inner])
    return f"{lead} {json.dumps(value, ensure_ascii=False)}"


def _key(key: Any) -> str:
    return str(key) if _PLAIN.fullmatch(str(key)) else json.dumps(str(key), ensure_ascii=False)


def _column(text: str, at: int) -> int:
    return at - (text.rfind("\n", 0, at) + 1)
