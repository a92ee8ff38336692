"""Expands the words of a shell script as bash does: quotes, parameters, sums, and a few programs that only compute."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dstrain.errors import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command, with quotes and variables resolved."""

    text: str
    place: Place
    computed: str | None = None
    """The part that only a shell can compute, such as `$(nproc)`; None if the text is complete."""


@dataclass(slots=True, kw_only=True)
class Values:
    """The state of a script at one of its commands."""

    known: dict[str, tuple[Word, ...]]
    """Variable → its words; an array may have several."""
    script: str
    args: Sequence[Word] = ()
    """The arguments of a function, or of the script, which are not known."""


_CLOSING = {"(": ")", "{": "}"}


def end_of(text: str, at: int) -> int:
    """Returns the index behind a character, or behind the quoted or substituted part that begins there.

    Raises IndexError or ValueError for one without end.
    """
    sign = text[at]
    if sign == "\\":
        return at + 2
    if sign == "'":
        return text.index("'", at + 1) + 1
    if sign in '"`':
        at += 1
        while text[at] != sign:
            at = end_of(text, at) if text[at] in '\\$`"' else at + 1
        return at + 1
    opening = text[at + 1 : at + 2]
    if (sign == "$" and opening in ("(", "{")) or (sign in "<>" and opening == "("):
        return _end_of_group(text, at + 2, _CLOSING[opening])
    return at + 1


def _end_of_group(text: str, at: int, closing: str) -> int:
    """Returns the index behind the bracket that closes a group; groups may be nested."""
    while text[at] != closing:
        if text[at] == "(" and closing == ")":
            at = _end_of_group(text, at + 1, ")")
        elif text[at] == "#" and text[at - 1] in " \t" and closing == ")" and "\n" in text[at:]:
            at = text.index("\n", at)
        else:
            at = end_of(text, at)
    return at + 1


@dataclass(slots=True)
class _Field:
    """A word that is being put together."""

    text: str = ""
    computed: str | None = None
    is_quoted: bool = False
    place: Place | None = None


_PARTS = {False: "\\'$`", True: "\\$`"}
"""Signs with which a part of a word begins, by whether it stands in double quotes."""


def expanded(raw: str, place: Place, values: Values, *, is_split: bool = True, unset: str | None = None) -> list[Word]:
    """Returns the words that bash makes of one: none, one, or several of a variable without quotes.

    `unset` stands for variables that nobody has set; without it their words are not known.
    """
    fields, at, is_double = [_Field()], 0, False
    while at < len(raw):
        sign, stop = raw[at], end_of(raw, at) if raw[at] in _PARTS[is_double] else at + 1
        if sign == "\\":
            following = raw[at + 1 : at + 2]
            # in double quotes a backslash escapes these alone
            keeps = is_double and following not in '$`"\\\n'
            fields[-1].text += (sign if keeps else "") + (following if following != "\n" else "")
            fields[-1].is_quoted = True
        elif sign == "'" and not is_double:
            fields[-1].text += raw[at + 1 : stop - 1]
            fields[-1].is_quoted = True
        elif sign == '"':
            is_double = not is_double
            fields[-1].is_quoted = True
        elif sign in "$`":
            if sign == "$" and (name := re.compile(r"\$(?:\w+|[@*#?$!-])").match(raw, at)):
                # $10 is $1 and a 0
                stop = name.end() if not name[0][1].isdigit() else at + 2
            found = _substituted(raw[at:stop], place, values, unset)
            _add(
                fields,
                found,
                is_list=raw[at:stop] in ("$@", "$*") or raw[at:stop].endswith("[@]}"),
                splits=is_split and not is_double,
            )
        else:
            stop = at + 1
            fields[-1].text += sign
        at = stop
    return [
        Word(text=field.text, place=field.place or place, computed=field.computed)
        for field in fields
        if field.text or field.is_quoted or field.computed
    ]


def _add(fields: list[_Field], found: Sequence[Word], *, is_list: bool, splits: bool) -> None:
    """Adds an expansion to the fields: words of a list stay apart, and a text without quotes is split at blanks."""
    if not (splits or is_list):
        fields[-1].text += " ".join(word.text for word in found)
        fields[-1].computed = next((word.computed for word in found if word.computed), fields[-1].computed)
        return
    for count, word in enumerate(found):
        parts = [word.text] if word.computed or not splits else word.text.split()
        starts = count > 0 or (splits and word.text[:1].isspace() and bool(fields[-1].text))
        for part in parts:
            if starts:
                fields.append(_Field(place=word.place if is_list else None))
            fields[-1].text += part
            fields[-1].computed = word.computed or fields[-1].computed
            fields[-1].place = fields[-1].place or (word.place if is_list and len(found) > 1 else None)
            starts = True
        if splits and parts and word.text[-1:].isspace():
            fields.append(_Field())


def _substituted(raw: str, place: Place, values: Values, unset: str | None) -> Sequence[Word]:
    """Returns the words of `$name`, `${…}`, `$((…))` or `$(…)`; one that is not known says what is missing."""
    if raw == "$":
        return (Word(text="$", place=place),)
    if raw.startswith("$(("):
        text = _sum(raw[3:-2], place, values) if raw.endswith("))") else None
    elif raw[0] == "`" or raw.startswith("$("):
        text = _output(raw[1:-1] if raw[0] == "`" else raw[2:-1], place, values)
    else:
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        found = _parameter(inner, place, values)
        if found is None and unset is not None:
            return (Word(text=unset, place=place),)
        return (Word(text=raw, place=place, computed=raw),) if found is None else found
    return (Word(text=raw, place=place, computed=raw) if text is None else Word(text=text, place=place),)


_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#])(?:\[([^\]]*)\])?(.*)", re.DOTALL)


def _parameter(inner: str, place: Place, values: Values) -> Sequence[Word] | None:
    """Returns the words of a parameter; None if nobody has set it, or for a form that is not known."""
    match = _PARAMETER.fullmatch(inner)
    if match is None:
        return None
    counts, name, index, rest = match.groups()
    found = _named(name, values)
    if found is not None and index not in (None, "@", "*"):
        found = found[int(index) :][:1] if re.fullmatch(r"-?\d+", index) else None
    elif found is not None and index is None and name not in "@*":
        found = found[:1]
    if counts:
        text = None if found is None else len(found) if index else len(found[0].text) if found else 0
        return None if text is None else (Word(text=str(text), place=place),)
    if default := re.match(r":?([-=+?])", rest):
        is_set = found is not None and (bool(found and found[0].text) or rest[0] != ":")
        if default[1] == "+":
            return expanded(rest[default.end() :], place, values, is_split=False) if is_set else ()
        if is_set or default[1] == "?":
            return found
        found = expanded(rest[default.end() :], place, values, is_split=False)
        if default[1] == "=":
            values.known[name] = tuple(found)
        return found
    if not rest or found is None:
        return found
    # what is left are edits: `${name%.json}`, `${name##*/}`, `${name/a/b}`
    texts = [_edited(word.text, rest) for word in found]
    if any(text is None for text in texts):
        return None
    return tuple(replace(word, text=text or "") for word, text in zip(found, texts, strict=True))


def _named(name: str, values: Values) -> Sequence[Word] | None:
    """Returns the words of a variable or of arguments; None if nobody has set them."""
    place = Place(file=values.script)
    if name == "0":
        return (Word(text=values.script, place=place),)
    if name == "#":
        return (Word(text=str(len(values.args)), place=place),)
    if name in "@*":
        return values.args
    if name.isdigit():
        return values.args[int(name) - 1 : int(name)] or None
    if name == "PWD" and name not in values.known:
        return (Word(text=str(Path.cwd()), place=place),)
    return values.known.get(name)


def _edited(text: str, rest: str) -> str | None:
    """Returns a value without the beginning or the end that a pattern matches, or with a part replaced; None for
    another form.

    >>> _edited("a/b.sh", "##*/"), _edited("a/b.sh", "%.*"), _edited("a-b", "//-/_"), _edited("abc", ":1:1")
    ('b.sh', 'a/b', 'a_b', 'b')
    """
    if (match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)) is not None:
        ends = range(len(text) + 1)
        is_start = match[1][0] == "#"
        order = ends if (len(match[1]) == 1) is is_start else reversed(ends)
        for at in order:
            if fnmatch.fnmatchcase(text[:at] if is_start else text[at:], match[2]):
                return text[at:] if is_start else text[:at]
        return text
    if (match := re.fullmatch(r"(//?)([^/]+)(?:/(.*))?", rest, re.DOTALL)) is not None:
        if any(sign in match[2] for sign in "*?["):
            return None
        return text.replace(match[2], match[3] or "", -1 if match[1] == "//" else 1)
    if (match := re.fullmatch(r":\s*(-?\d+)(?::(\d+))?", rest)) is not None:
        start = int(match[1])
        return text[start : start + int(match[2]) if match[2] else None]
    return {"^^": text.upper(), ",,": text.lower()}.get(rest)


_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, other: abs(one) // abs(other) * (1 if (one < 0) is (other < 0) else -1),
    ast.Mod: lambda one, other: abs(one) % abs(other) * (-1 if one < 0 else 1),
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
"""Integer operators of a shell."""
_COMPARED: Mapping[type[ast.AST], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _sum(text: str, place: Place, values: Values) -> str | None:
    """Returns the result of a sum of whole numbers, whose names are variables; None if something is not known."""
    words = expanded(text, place, values, is_split=False)
    if any(word.computed for word in words) or not words:
        return None

    def value(match: re.Match[str]) -> str:
        found = values.known.get(match[0])
        return "?" if not found or found[0].computed else f"({found[0].text})"

    plain = re.sub(r"[A-Za-z_]\w*", value, words[0].text).replace("\n", " ").strip()
    if (choice := re.fullmatch(r"([^?]*)\?([^:]*):(.*)", plain)) is not None:
        plain = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    try:
        return str(_value(ast.parse(plain, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    """Returns the value of an expression of whole numbers. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARED:
            return int(_COMPARED[type(sign)](_value(left), _value(right)))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _value(test) else other)
    raise ValueError(ast.dump(node))


_COUNTS_GPUS = re.compile(r"cuda\.device_count\(\)|nvidia-smi\b.*\|\s*wc -l|nvidia-smi\b.*count", re.DOTALL)


def _output(text: str, place: Place, values: Values) -> str | None:
    """Returns the output of a program that only computes, or counts GPUs whose number is known; None for others."""
    if text.lstrip().startswith("#"):
        return ""
    if _COUNTS_GPUS.search(text) and (known := values.known.get(GPUS_OF_A_NODE)):
        return known[0].text
    if (sum_ := re.fullmatch(r"\s*echo\s+(.*?)\s*\|\s*bc\s*|\s*bc\s*<<<\s*(.*)", text, re.DOTALL)) is not None:
        return _sum(re.sub(r"[\"']", "", sum_[1] or sum_[2]), place, values)
    try:
        words = [word for part in _parts(text) for word in expanded(part, place, values)]
    except (IndexError, ValueError):
        return None
    # behind a pipe or a redirection another program has the output
    if any(word.computed for word in words) or re.search(r"(?<!\\)[|;&<>\n]", text.strip()):
        return None
    match [word.text for word in words]:
        case ["expr", *rest]:
            return _sum(" ".join(rest), place, values)
        case ["echo", *rest]:
            return " ".join(word for word in rest if word not in ("-n", "-e"))
        case ["pwd", *_]:
            return str(Path.cwd())
        case ["basename", path, *suffix]:
            return Path(path).name.removesuffix(suffix[0] if suffix else "")
        case ["dirname", path]:
            return str(Path(path).parent)
    return None


GPUS_OF_A_NODE = "NPROC_PER_NODE"
"""The variable that says how many GPUs a node has, where the command line of the import does."""


def _parts(text: str) -> list[str]:
    """Returns the words of a command with their quotes."""
    parts, at, start = list[str](), 0, 0
    while at < len(text):
        if text[at].isspace():
            parts += [text[start:at]] if at > start else []
            start = at = at + 1
        else:
            at = end_of(text, at)
    return [*parts, text[start:at]] if at > start else parts
