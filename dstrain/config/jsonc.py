"""Reads JSON with comments, trailing commas and a BOM, with the position of every value, and changes values."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from dstrain.errors import InvalidConfig, Place, merge_hint

Pointer = tuple[str | int, ...]

SPACE = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|\#[^\n]*|/\*.*?\*/)*", re.DOTALL)
"""White space and comments."""
_COMMENT = re.compile(r"//|\#|/\*")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
"""A string with its quotes."""
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"\w*")
_WORDS = {"true": True, "false": False, "null": None}
_MOST_CHARACTERS = 2**22
_MAX_DEPTH = 100
"""Levels of nesting; no configuration has ten, and Python's stack ends at a thousand."""


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of one value in a text."""

    key: int
    """The start of its key; for list items and the whole document, of the value itself."""
    start: int
    end: int
    """One past its last character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A second occurrence of a key in its object."""

    pointer: Pointer
    """The key; the last value applies, as in Python's json."""
    first: int
    """Offset of the previous occurrence."""
    at: int
    """Offset of this occurrence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file: its value, and the position of each key and value."""

    value: Any
    """Dicts, lists, strings, numbers, booleans and None."""
    name: str
    """The file's name in messages."""
    text: str
    spans: Mapping[Pointer, Span]
    repeated: tuple[Repeated, ...]
    """In the order of the text."""
    extras: Mapping[str, int]
    """Extensions of plain JSON (`a BOM`, `a comment`, `a trailing comma`): the offset of the first of each."""

    def place(self, pointer: Pointer) -> Place:
        """Returns the place of the deepest existing part of a pointer."""
        while pointer and pointer not in self.spans:
            pointer = pointer[:-1]
        return place_of(self.text, self.spans[pointer].key, self.name)


class SyntaxProblem(InvalidConfig):
    """An unreadable text; it always has a place."""


def newline_of(text: str) -> str:
    """Returns the line ending of a text."""
    return "\r\n" if "\r\n" in text else "\n"


def place_of(text: str, at: int, name: str) -> Place:
    """Returns the place of an offset in the text of a file; a BOM takes no column."""
    start = text.rfind("\n", 0, at) + 1
    before = text[start:at]
    column = len(before) - before.startswith("\ufeff") + 1
    return Place(file=name, line=text.count("\n", 0, at) + 1, column=column)


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.spans: dict[Pointer, Span] = {}
        self.order: list[Pointer] = []
        self.repeated: list[Repeated] = []
        self.extras: dict[str, int] = {"a BOM": 0} if text.startswith("\ufeff") else {}

    def fail(self, problem: str) -> SyntaxProblem:
        hint = merge_hint(self.text) if self.text.strip() else "Write {} for no settings, or remove the empty file."
        return SyntaxProblem(problem, place=place_of(self.text, self.at, self.name), hint=hint)

    def skip(self) -> str:
        """Skips white space and comments; returns the next character, or "" at the end."""
        match = SPACE.match(self.text, self.at)
        if match and match[0] and (comment := _COMMENT.search(match[0])):
            self.extras.setdefault("a comment", self.at + comment.start())
        self.at = match.end() if match else self.at
        return self.text[self.at : self.at + 1]

    def value(self, pointer: Pointer, key: int | None = None) -> Any:
        """Returns the next value and records its place; `key` is the offset of its key."""
        head = self.skip()
        if len(pointer) > _MAX_DEPTH:
            raise self.fail(f"this value is nested more than {_MAX_DEPTH} levels deep")
        start = self.at
        value = self.bare_value(pointer, head)
        self.spans[pointer] = Span(start if key is None else key, start, self.at)
        self.order.append(pointer)
        return value

    def bare_value(self, pointer: Pointer, head: str) -> Any:
        if head == "{":
            return self.object(pointer)
        if head == "[":
            return self.array(pointer)
        if head == '"':
            return self.string()
        if match := _NUMBER.match(self.text, self.at):
            return self.number(match)
        word = _WORD.match(self.text, self.at)
        if word and word[0] in _WORDS:
            self.at += len(word[0])
            return _WORDS[word[0]]
        if not head:
            raise self.fail("the file ends here, but a value is missing")
        raise self.fail(f"{word[0] if word and word[0] else head!r} is not a JSON value; strings need double quotes")

    def number(self, match: re.Match[str]) -> int | float:
        try:
            number: int | float = json.loads(match[0])
            float(number)
        except (ValueError, OverflowError):  # Python converts at most 4300 digits, and a float has at most 308
            number = math.inf
        if isinstance(number, float) and not math.isfinite(number):
            raise self.fail("this number is too large")
        self.at = match.end()
        return number

    def string(self) -> str:
        match = STRING.match(self.text, self.at)
        if match is None:
            raise self.fail("this string is not closed on its line")
        try:
            decoded: str = json.loads(match[0])
        except ValueError:
            raise self.fail("this string has an invalid escape sequence") from None
        if any("\ud800" <= letter <= "\udfff" for letter in decoded):
            raise self.fail("this string contains a lone surrogate")
        self.at = match.end()
        return decoded

    def object(self, pointer: Pointer) -> dict[str, Any]:
        self.at += 1
        members: dict[str, Any] = {}
        inside: dict[str, slice] = {}
        while (head := self.skip()) != "}":
            if head != '"':
                raise self.fail("expected a key in double quotes, or }")
            start = self.at
            key = self.string()
            here = (*pointer, key)
            if key in members:
                self.repeated.append(Repeated(pointer=here, first=self.spans[here].key, at=start))
                for inner in self.order[inside[key]]:  # the later value replaces this one
                    self.spans.pop(inner, None)
            if self.skip() != ":":
                raise self.fail(f'missing colon after "{key}"')
            self.at += 1
            first = len(self.order)
            members[key] = self.value(here, start)
            inside[key] = slice(first, len(self.order))
            self.separator("}")
        self.at += 1
        return members

    def array(self, pointer: Pointer) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        while self.skip() != "]":
            items.append(self.value((*pointer, len(items))))
            self.separator("]")
        self.at += 1
        return items

    def separator(self, end: str) -> None:
        """Skips one comma, which is optional before the end."""
        head = self.skip()
        if head == ",":
            comma = self.at
            self.at += 1
            if self.skip() == end:
                self.extras.setdefault("a trailing comma", comma)
        elif head != end:
            raise self.fail(f"missing comma or {end}" if head else f"the file ends here, but {end} is missing")


def read(text: str, name: str) -> Document:
    """Returns the parsed text; keys may be repeated. Raises SyntaxProblem if the text is not even tolerant JSON.

    >>> read('{"a": 1, "a": 2, // two\\n}', "x.json").value
    {'a': 2}
    """
    parser = _Parser(text, name)
    if len(text) > _MOST_CHARACTERS:
        raise parser.fail(f"the file has {len(text):,} characters; the maximum is {_MOST_CHARACTERS:,}")
    value = parser.value(())
    if parser.skip():
        raise parser.fail("unexpected text after the end of the value")
    return Document(
        value=value,
        name=name,
        text=text,
        spans=parser.spans,
        repeated=tuple(parser.repeated),
        extras=parser.extras,
    )


def parse(text: str, name: str) -> Document:
    """Returns the parsed text as `read` does; raises SyntaxProblem also for repeated keys.

    >>> parse('{"a": [1, 2,], // two\\n}', "x.json").value
    {'a': [1, 2]}
    """
    document = read(text, name)
    for key in document.repeated:
        first = place_of(text, key.first, name).line
        problem = f'the key "{key.pointer[-1]}" is repeated (first on line {first})'
        raise SyntaxProblem(problem, place=place_of(text, key.at, name))
    return document


def json_pointer(pointer: Pointer) -> str:
    """Returns a pointer in the form of RFC 6901.

    >>> json_pointer(("zero_optimization", "a/b"))
    '/zero_optimization/a~1b'
    """
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in pointer)


class Mark(Enum):
    """A marker in place of a value."""

    REMOVED = "removed"
    """The key is missing, or is to be removed."""
    UNCHANGED = "unchanged"
    """The value stays as it is."""


REMOVED: Final[Literal[Mark.REMOVED]] = Mark.REMOVED
UNCHANGED: Final[Literal[Mark.UNCHANGED]] = Mark.UNCHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one key: a new value, a new name, a new comment, or several of these."""

    pointer: Pointer
    """The key; a missing one is added, with the objects around it."""
    value: Any = UNCHANGED
    """The new value, or REMOVED."""
    after: tuple[str, ...] | None = None
    """For an added key: the keys that precede it in its source, in order. It is inserted after the last of them that
    exists, or first if none does; None appends it."""
    renamed: str | None = None
    """The key's new name, which no other key of its object may have."""
    comment: str | None = None
    """The comment at the end of its line, without `#`; "" removes it, None keeps it. Only for YAML."""


def same(one: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal; 1 equals 1.0, 1 does not equal true.

    >>> same({"a": [1]}, {"a": [1.0]}), same(1, True)
    (True, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def lookup(value: Any, pointer: Pointer, default: Any = REMOVED) -> Any:
    """Returns the value at a pointer, or `default`."""
    for key in pointer:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return default
    return value


def applied(value: Any, changes: Sequence[Change]) -> Any:
    """Returns a changed copy of a value."""
    top = [copy.deepcopy(value)]
    for change in changes:
        if lookup(top[0], change.pointer) is not REMOVED or not isinstance(change.value, Mark):
            _set(top, (0, *change.pointer), change)
    return top[0]


def _set(top: Any, pointer: Pointer, change: Change) -> None:
    for key in pointer[:-1]:
        if isinstance(top, dict) and not isinstance(top.get(key), dict | list):
            top[key] = {}  # other values, such as null, cannot contain the key
        top = top[key]
    last: Any = pointer[-1]
    if change.value is REMOVED:
        del top[last]
        return
    if change.value is not UNCHANGED:
        top[last] = copy.deepcopy(change.value)
    if change.renamed is not None:
        items = [(change.renamed if key == last else key, value) for key, value in top.items()]
        top.clear()
        top.update(items)


def dotted(pointer: Pointer) -> str:
    """Returns a pointer in dotted form.

    >>> dotted(("zero_optimization", "stage"))
    'zero_optimization.stage'
    """
    return ".".join(map(str, pointer)) or "the whole file"
