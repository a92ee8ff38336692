"""A reader of JSON as people write it: comments, trailing commas and a BOM are fine, and every value has a position."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from dstrain.errors import InvalidConfig

Pointer = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|\#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 100
"""Levels of nesting; no configuration has ten, and Python's own stack ends at a thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file: its value, and where each key (for list items: each value) starts."""

    value: Any
    """Dicts, lists, strings, numbers, booleans and None."""
    name: str
    """The file, as people should see it."""
    positions: dict[Pointer, tuple[int, int]]
    """Line and column, from 1, of every pointer."""

    def where(self, pointer: Pointer) -> str:
        """Returns `file:line:column` of the deepest part of the pointer that exists."""
        while pointer and pointer not in self.positions:
            pointer = pointer[:-1]
        line, column = self.positions.get(pointer, (1, 1))
        return f"{self.name}:{line}:{column}"


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.positions: dict[Pointer, tuple[int, int]] = {}

    def fail(self, problem: str, at: int | None = None) -> InvalidConfig:
        line, column = self.place(self.at if at is None else at)
        return InvalidConfig(f"{self.name}:{line}:{column}: {problem}")

    def place(self, at: int) -> tuple[int, int]:
        start = self.text.rfind("\n", 0, at) + 1
        return self.text.count("\n", 0, at) + 1, at - start + 1

    def skip(self) -> str:
        """Moves past white space and comments; returns the next character, or "" at the end."""
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.text[self.at : self.at + 1]

    def value(self, pointer: Pointer) -> Any:
        head = self.skip()
        if len(pointer) > _MAX_DEPTH:
            raise self.fail(f"this is nested more than {_MAX_DEPTH} levels deep")
        self.positions.setdefault(pointer, self.place(self.at))
        if head == "{":
            return self.object(pointer)
        if head == "[":
            return self.array(pointer)
        if head == '"':
            return self.string()
        if match := _NUMBER.match(self.text, self.at):
            return self.number(match)
        word = re.match(r"\w*", self.text[self.at :])
        if word and word[0] in _WORDS:
            self.at += len(word[0])
            return _WORDS[word[0]]
        if not head:
            raise self.fail("the file ends here; a value is missing")
        shown = word[0] if word and word[0] else head
        raise self.fail(f"{shown!r} is not a JSON value; strings need double quotes")

    def number(self, match: re.Match[str]) -> int | float:
        try:
            number: int | float = json.loads(match[0])
        except ValueError:  # Python converts no more than 4300 digits
            number = math.inf
        if isinstance(number, float) and not math.isfinite(number):
            raise self.fail("this number is too large")
        self.at = match.end()
        return number

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise self.fail("this string has no end on its line")
        try:
            decoded: str = json.loads(match[0])
        except ValueError:
            raise self.fail("this string has an escape that JSON does not know") from None
        self.at = match.end()
        return decoded

    def object(self, pointer: Pointer) -> dict[str, Any]:
        self.at += 1
        found: dict[str, Any] = {}
        while (head := self.skip()) != "}":
            if head != '"':
                raise self.fail("a key in double quotes, or }, is expected here")
            start = self.at
            key = self.string()
            here = (*pointer, key)
            if key in found:
                line, _ = self.positions[here]
                raise self.fail(f'the key "{key}" stands here again (first on line {line})', start)
            self.positions[here] = self.place(start)
            if self.skip() != ":":
                raise self.fail(f'a colon is missing after "{key}"')
            self.at += 1
            found[key] = self.value(here)
            self.separator("}")
        self.at += 1
        return found

    def array(self, pointer: Pointer) -> list[Any]:
        self.at += 1
        found: list[Any] = []
        while self.skip() != "]":
            found.append(self.value((*pointer, len(found))))
            self.separator("]")
        self.at += 1
        return found

    def separator(self, end: str) -> None:
        """Moves past one comma, which may be missing before the end."""
        head = self.skip()
        if head == ",":
            self.at += 1
        elif head != end:
            raise self.fail(f"a comma or {end} is missing here" if head else f"the file ends here; {end} is missing")


def parse(text: str, name: str) -> Document:
    """Returns the parsed text. Raises InvalidConfig with `name:line:column` for anything that is not JSON, even
    tolerantly read, and for a key that stands twice.

    >>> parse('{"a": [1, 2,], // two\\n}', "x.json").value
    {'a': [1, 2]}
    """
    parser = _Parser(text, name)
    value = parser.value(())
    if parser.skip():
        raise parser.fail("the value has ended; nothing more may stand here")
    return Document(value=value, name=name, positions=parser.positions)
