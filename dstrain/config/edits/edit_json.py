"""Edits JSON text in place: comments, order, line ends and a BOM are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from dstrain.config.jsonc import REMOVED, SPACE, STRING, UNCHANGED, Change, Document, Pointer, Span, newline_of, read

_REST_OF_LINE = re.compile(r"(?:[ \t]+|//[^\n]*|\#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_BLANK = " \t\ufeff"


def apply(text: str, name: str, changes: Sequence[Change]) -> str:
    """Returns the text after the changes, which are applied in order. Raises SyntaxProblem if it is not JSON.

    >>> apply('{"a": 1, // one\\n "b": 2}', "x.json", [Change(pointer=("b",), value=REMOVED)])
    '{"a": 1 // one\\n }'
    """
    for change in changes:
        text = _changed(text, name, change)
    return text


def _changed(text: str, name: str, change: Change) -> str:
    document = read(text, name)
    pointer = change.pointer
    if change.value is REMOVED:
        while pointer in document.spans:  # a repeated key has further occurrences
            document = read(_removed(document, pointer), name)
        return document.text
    if change.value is not UNCHANGED:
        if pointer in document.spans:
            span = document.spans[pointer]
            new = _value_text(document, pointer, change.value)
            text = text[: span.start] + new + text[span.end :]
        else:
            text = _added(document, change)
    return text if change.renamed is None else _renamed(text, name, pointer, change.renamed)


def _renamed(text: str, name: str, pointer: Pointer, key: str) -> str:
    """Returns the text with a key renamed and its earlier occurrences removed."""
    document = read(text, name)
    if pointer not in document.spans or pointer[-1] == key:
        return text
    other = (*pointer[:-1], key)
    if other in document.spans:
        raise ValueError(f"{document.place(other)}: {key} already exists")
    span = document.spans[pointer]
    renamed = text[: span.key] + json.dumps(key, ensure_ascii=False) + text[_end_of_string(text, span.key) :]
    return _changed(renamed, name, Change(pointer=pointer, value=REMOVED))


def _end_of_string(text: str, start: int) -> int:
    match = STRING.match(text, start)
    assert match is not None, "a key is a string"
    return match.end()


def _skipped(text: str, at: int) -> int:
    """Returns the offset after white space and comments."""
    match = SPACE.match(text, at)
    return match.end() if match else at


def _comma(text: str, end: int) -> int | None:
    """Returns the offset of the comma after a value, or None."""
    at = _skipped(text, end)
    return at if text[at : at + 1] == "," else None


def _children(document: Document, pointer: Pointer) -> list[tuple[str | int, Span]]:
    """Returns the members of an object or a list in the order of the text."""
    depth = len(pointer)
    inner = [
        (path[-1], span) for path, span in document.spans.items() if len(path) == depth + 1 and path[:depth] == pointer
    ]
    return sorted(inner, key=lambda pair: pair[1].key)


# --- remove


def _removed(document: Document, pointer: Pointer) -> str:
    """Returns the text without a member, its comma, and its line if that becomes empty; comments around it stay."""
    text, span = document.text, document.spans[pointer]
    comma = _comma(text, span.end)
    if comma is not None:
        ranges = [(span.key, span.end), (comma, comma + 1)]
    else:
        before = _comma_before(document, pointer)
        ranges = [(span.key, span.end)] if before is None else [(before, before + 1), (span.key, span.end)]
    if len(ranges) == 2 and not text[ranges[0][1] : ranges[1][0]].strip(_BLANK):
        ranges = [(ranges[0][0], ranges[1][1])]
    for start, end in reversed(ranges):
        start, end = _with_blanks(text, start, end, is_followed=comma is not None)
        text = text[:start] + text[end:]
    return text


def _comma_before(document: Document, pointer: Pointer) -> int | None:
    """Returns the offset of the last comma before a member, or None if it is the first."""
    at, comma = document.spans[pointer[:-1]].start + 1, None
    while (at := _skipped(document.text, at)) < document.spans[pointer].key:
        if document.text[at] == ",":
            comma = at
        at = _end_of_string(document.text, at) if document.text[at] == '"' else at + 1
    return comma


def _with_blanks(text: str, start: int, end: int, *, is_followed: bool) -> tuple[int, int]:
    """Returns a range to remove, extended by adjacent blanks, or to the whole line if nothing else is on it."""
    left = start
    while left > 0 and text[left - 1] in " \t":
        left -= 1
    right = end
    while right < len(text) and text[right] in " \t":
        right += 1
    begins_line = left == 0 or text[left - 1] == "\n"
    newline = next((ending for ending in ("\r\n", "\n") if text.startswith(ending, right)), None)
    if begins_line and newline is not None:
        return left, right + len(newline)
    if begins_line or is_followed:
        return start, right
    return (left if text[right : right + 1] in ("\r", "\n", "}", "]", "") and left < start else start), end


# --- add


def _added(document: Document, change: Change) -> str:
    """Returns the text with a key added, including missing objects around it."""
    parent, value = change.pointer[:-1], change.value
    key, after = change.pointer[-1], change.after
    while parent not in document.spans:
        value, key, parent, after = {key: value}, parent[-1], parent[:-1], None
    span = document.spans[parent]
    if document.text[span.start] != "{":
        raise ValueError(f"{document.place(parent)}: {key} cannot be added to a value that is not an object")
    members = _children(document, parent)
    known = dict(members)
    if after is None:
        neighbour = members[-1][1] if members else None
    else:
        neighbour = next((known[name] for name in reversed(after) if name in known), None)
    if neighbour is not None:
        return _added_after(document, parent, neighbour, (key, value))
    if members:
        return _added_first(document, parent, members[0][1], (key, value))
    return _added_alone(document, parent, (key, value))


def _added_after(document: Document, parent: Pointer, neighbour: Span, member: tuple[Any, Any]) -> str:
    text = document.text
    comma = _comma(text, neighbour.end)
    at = neighbour.end if comma is None else comma + 1
    end_of_line = _end_of_line(text, at)
    entry = _entry(document, parent, member, is_on_one_line=end_of_line is None)
    if end_of_line is None:
        return text[:at] + (f", {entry}" if comma is None else f" {entry},") + text[at:]
    lead = newline_of(text) + _indent(document, parent)
    if comma is None:
        return text[:at] + "," + text[at:end_of_line] + lead + entry + text[end_of_line:]
    return text[:end_of_line] + lead + entry + "," + text[end_of_line:]


def _added_first(document: Document, parent: Pointer, first: Span, member: tuple[Any, Any]) -> str:
    text = document.text
    end_of_line = _end_of_line(text, document.spans[parent].start + 1)
    entry = _entry(document, parent, member, is_on_one_line=end_of_line is None)
    if end_of_line is None:
        return text[: first.key] + entry + ", " + text[first.key :]
    return text[:end_of_line] + newline_of(text) + _indent(document, parent) + entry + "," + text[end_of_line:]


def _added_alone(document: Document, parent: Pointer, member: tuple[Any, Any]) -> str:
    """Returns the text with a member added to an empty object, after the object's comments."""
    text, span = document.text, document.spans[parent]
    inside = text[span.start + 1 : span.end - 1]
    is_on_one_line = bool(parent) and _is_on_one_line(document, parent[:-1])
    entry = _entry(document, parent, member, is_on_one_line=is_on_one_line)
    if is_on_one_line:
        return text[: span.end - 1] + entry + text[span.end - 1 :]
    newline, closing = newline_of(text), _line_indent(text, span.key)
    kept = inside.rstrip(" \t\r\n")
    middle = kept + newline + _indent(document, parent) + entry + newline + closing
    return text[: span.start + 1] + middle + text[span.end - 1 :]


def _end_of_line(text: str, at: int) -> int | None:
    """Returns the end of the line, after comments that begin on it; None if it contains anything else."""
    match = _REST_OF_LINE.match(text, at)
    end = match.end() if match else at
    if text[end : end + 1] == "\n":
        return end - 1 if text[end - 1] == "\r" else end
    return end if text.startswith("\r\n", end) else None


# --- text


def _entry(document: Document, parent: Pointer, member: tuple[Any, Any], *, is_on_one_line: bool) -> str:
    key, value = member
    indent = None if is_on_one_line else _indent(document, parent)
    return f"{json.dumps(key, ensure_ascii=False)}: {_dumped(document, value, indent)}"


def _value_text(document: Document, pointer: Pointer, value: Any) -> str:
    """Returns the text of a value that replaces another; on one line if the other, or its object, is on one line."""
    span = document.spans[pointer]
    old = document.text[span.start : span.end]
    is_short = "\n" not in old and old[:1] in ("{", "[") and old not in ("{}", "[]")
    if is_short or (pointer and _is_on_one_line(document, pointer[:-1])):
        return _dumped(document, value, None)
    return _dumped(document, value, _line_indent(document.text, span.key))


def _dumped(document: Document, value: Any, indent: str | None) -> str:
    """Returns a value as JSON: on one line, or on several with `indent` before all but the first."""
    if indent is None:
        return json.dumps(value, ensure_ascii=False)
    lines = json.dumps(value, ensure_ascii=False, indent=_unit(document)).split("\n")
    return (newline_of(document.text) + indent).join(lines)


def _line_indent(text: str, at: int) -> str:
    """Returns the indentation of the line of an offset."""
    start = text.rfind("\n", 0, at) + 1
    line = text[start:at].lstrip("\ufeff")
    return line[: len(line) - len(line.lstrip(" \t"))]


def _begins_line(text: str, at: int) -> bool:
    start = text.rfind("\n", 0, at) + 1
    return start > 0 and not text[start:at].strip(_BLANK)


def _indent(document: Document, parent: Pointer) -> str:
    """Returns the indentation of an object's members: the existing one, or one level more than the object's."""
    text = document.text
    for _, span in _children(document, parent):
        if _begins_line(text, span.key):
            return _line_indent(text, span.key)
    return _line_indent(text, document.spans[parent].key) + _unit(document)


def _unit(document: Document) -> str:
    """Returns one level of indentation: the one before the document's first member, or two spaces."""
    for _, span in _children(document, ()):
        if _begins_line(document.text, span.key):
            return _line_indent(document.text, span.key) or "  "
    return "  "


def _is_on_one_line(document: Document, pointer: Pointer) -> bool:
    """Returns whether the members of an object begin on its first line."""
    members = _children(document, pointer)
    return bool(members) and "\n" not in document.text[document.spans[pointer].start : members[0][1].key]
