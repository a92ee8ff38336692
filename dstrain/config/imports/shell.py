"""Reads the commands of a shell script without running it: words with their lines, and variables."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dstrain.errors import InvalidConfig, Place

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\r?\n)+)
    |(?P<comment>\#[^\n]*)
    |(?P<end>\n|;|&&|\|\||[|&()])
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\((?:[^()]|\([^()]*\)|\(\([^()]*\)\))*\)|\$\{[^}]*\}|[^\s;&|()\\'"])+)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}$]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\s*expr\s+([\d\s+*/%-]+)\)|\$\(\(([\d\s+*/%()-]+)\)\)")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
"""What a shell computes with whole numbers."""
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command, with quotes and variables resolved."""

    text: str
    place: Place
    computed: str | None = None
    """The part that only a shell can compute, such as `$(nproc)`; None if the text is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a script."""

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    """Variables that are exported or set before the command."""

    @property
    def texts(self) -> list[str]:
        """The words as text."""
        return [word.text for word in self.words]


def commands(text: str, name: str) -> Iterator[Command]:
    """Yields the commands of a script in its order; continued lines are one command.

    Variables get the value of the last assignment before them. Raises InvalidConfig for a quote without end.

    >>> [command.texts for command in commands("A=1\\ntrain --n $A \\\\\\n  'x#1' # why", "run.sh")]
    [['train', '--n', '1', 'x#1']]
    """
    variables: dict[str, Word] = {}
    for raw in _raw_commands(text, name):
        words = [_word(part, place, variables) for part, place in raw]
        if words and words[0].text in ("export", "env"):
            words = words[1:]
        own: dict[str, Word] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0].text)):
            own[match[1]] = Word(text=match[2], place=words[0].place, computed=words[0].computed)
            words = words[1:]
        if not words:
            variables |= own
        else:
            yield Command(words=tuple(words), environment={**variables, **own})


def _raw_commands(text: str, name: str) -> Iterator[Sequence[tuple[str, Place]]]:
    """Yields each command as unresolved words with their places."""
    at, words = 0, list[tuple[str, Place]]()
    while at < len(text):
        match = _TOKEN.match(text, at)
        start = text.rfind("\n", 0, at) + 1
        place = Place(file=name, line=text.count("\n", 0, at) + 1, column=at - start + 1)
        if match is None:
            raise InvalidConfig(
                "this quote is not closed", place=place, hint="Check the script with: bash -n " + shlex.quote(name)
            )
        if match.lastgroup == "word":
            words.append((match[0], place))
        elif match.lastgroup == "end" and words:
            if match[0] == "(" and _ARRAY.fullmatch(words[-1][0]):
                raise InvalidConfig("a shell array", place=place, hint="Write its words into the command.")
            yield words
            words = []
        at = match.end()
    if words:
        yield words


def _word(raw: str, place: Place, variables: Mapping[str, Word]) -> Word:
    """Returns a word as the shell would pass it on."""
    if raw.startswith("'"):
        return Word(text=_unquoted(raw), place=place)
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        if known is not None and known.computed is None:
            return known.text.replace("\\", "\\\\") if '"' in raw else shlex.quote(known.text)
        if match[2] is not None:
            return match[2]
        unknown.append(match[0])
        return match[0]

    text = _SUM.sub(_computed, _VARIABLE.sub(value, raw))
    computed = re.search(r"\$\(.*\)|`[^`]*`", text, re.DOTALL)
    return Word(
        text=_unquoted(text) if computed is None else text,
        place=place,
        computed=computed[0] if computed else unknown[0] if unknown else None,
    )


def _computed(match: re.Match[str]) -> str:
    """Returns the result of `$(expr 16 / 2)` or `$((16 / 2))` with whole numbers; the text itself if it has none."""
    try:
        return str(_value(ast.parse(match[1] or match[2], mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _value(node: ast.expr) -> int:
    """Returns the value of an expression of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


def _unquoted(text: str) -> str:
    try:
        return "".join(shlex.split(text)) if any(sign in text for sign in "'\"\\") else text
    except ValueError:
        return text
