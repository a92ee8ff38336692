"""Reads the commands of a shell script without running it: words with their lines, as bash would pass them on.

Assignments, expansions, sums, tests, loops, `case` and functions are followed as far as the text decides them. An
assignment that depends on something else leaves its variable unknown, and so does the output of a program.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dstrain.config.imports.shell_words import Values, Word, end_of, expanded
from dstrain.errors import InvalidConfig, Place

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+|\#[^\n]*")
_OPERATOR = re.compile(r"\n|;;&|;;|;&|;|&&|\|\||\|&|&(?!>)|[|()]")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|<>|>\||[<>](?!\())|&>>?")
_WORD_ENDS = " \t\r\n;&|()<>"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "declare", "local", "readonly", "typeset", "env")
_OPENS = {"if": ("then",), "while": ("do",), "until": ("do",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a script."""

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    """Variables that the script sets before the command, or for it."""

    @property
    def texts(self) -> list[str]:
        """The words as text."""
        return [word.text for word in self.words]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    raw: str
    place: Place
    kind: str
    """`word`, `operator` or `redirection`."""
    is_adjacent: bool
    """Whether nothing stands between it and the token before it."""


def commands(text: str, name: str, given: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Yields the commands of a script in the order in which bash would start them; `given` are variables that are set
    before it. A command that only a condition outside the script decides is yielded too.

    Raises InvalidConfig for a quote without end.

    >>> [command.texts for command in commands("A=1\\ntrain --n $((A + 1)) \\\\\\n  'x#1' # why", "run.sh")]
    [['train', '--n', '2', 'x#1']]
    """
    known: dict[str, tuple[Word, ...]] = {
        key: (Word(text=value, place=Place(file=name)),) for key, value in (given or {}).items()
    }
    yield from _Reader(tokens=tuple(_tokens(text, name)), values=Values(known=known, script=name)).run(True)


def _tokens(text: str, name: str, place: Place | None = None) -> Iterator[_Token]:
    """Yields the tokens of a script; all have the one `place` if the text is not the file's own."""
    at, heredocs, end = 0, list[str](), -1
    while at < len(text):
        if blank := _BLANK.match(text, at):
            at = blank.end()
            continue
        start = text.rfind("\n", 0, at) + 1
        here = place or Place(file=name, line=text.count("\n", 0, at) + 1, column=at - start + 1)
        redirection, operator = _REDIRECTION.match(text, at), _OPERATOR.match(text, at)
        match = redirection or operator
        stop = match.end() if match else _end_of_word(text, at, here)
        raw = text[at:stop]
        yield _Token(
            raw=raw,
            place=here,
            kind="redirection" if redirection else "operator" if operator else "word",
            is_adjacent=end == at,
        )
        if raw in ("<<", "<<-") and (word := re.compile(r"\s*(\S+)").match(text, stop)):
            heredocs.append(word[1].strip("'\"\\"))
        at = end = stop
        if raw == "\n":
            # bodies follow the line that names them, in its order
            for delimiter in heredocs:
                body = re.compile(rf"^\t*{re.escape(delimiter)}$\n?", re.MULTILINE).search(text, at)
                at = body.end() if body else len(text)
            heredocs = []


def _end_of_word(text: str, at: int, place: Place) -> int:
    stop = at
    try:
        while stop < len(text) and (text[stop] not in _WORD_ENDS or text.startswith(("<(", ">("), stop)):
            stop = end_of(text, stop)
    except (IndexError, ValueError):
        quoted = replace(place, column=(place.column or 1) + stop - at)
        hint = "Check the script with: bash -n " + shlex.quote(place.file)
        raise InvalidConfig("this quote is not closed", place=quoted, hint=hint) from None
    return stop


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Follows the tokens of a script. `live` says whether bash gets there: yes, no, or None if that is not known."""

    tokens: Sequence[_Token]
    values: Values
    at: int = 0
    status: bool | None = True
    """Whether the last command succeeded; None if that is not known."""
    functions: dict[str, int] = field(default_factory=dict)
    """Name → the index of its body."""
    own: dict[str, Word] = field(default_factory=dict)
    """Variables that the script itself sets."""
    depth: int = 0

    def _raw(self) -> str:
        return self.tokens[self.at].raw if self.at < len(self.tokens) else ""

    def _take(self, *words: str) -> bool:
        """Steps over one of these words or operators if it is next."""
        is_next = self._raw() in words and self.at < len(self.tokens)
        self.at += is_next
        return is_next

    def run(self, live: bool | None, *stops: str) -> Iterator[Command]:
        """Yields the commands up to one of the words `stops`."""
        own = live
        while self.at < len(self.tokens) and self._raw() not in stops:
            raw = self._raw()
            if self.tokens[self.at].kind == "operator" and raw != "(":
                self.at += 1
                own = _both(own, raw, self.status) if raw in ("&&", "||") else live
                continue
            before = self.at
            yield from self._command(own)
            self.at += self.at == before

    def _command(self, live: bool | None) -> Iterator[Command]:
        raw = self._raw()
        following = [token.raw for token in self.tokens[self.at + 1 : self.at + 3]]
        if raw in _OPENS:
            yield from self._conditional(live)
        elif raw == "for":
            yield from self._for(live)
        elif raw == "case":
            yield from self._case(live)
        elif raw == "function" or following == ["(", ")"]:
            self._function()
        elif raw in ("{", "("):
            self.at += 1
            yield from self.run(live, "}" if raw == "{" else ")")
            self.at += 1
        elif raw == "[[":
            self._test()
        elif raw == "!":
            self.at += 1
            yield from self._command(live)
            self.status = None if self.status is None else not self.status
        else:
            yield from self._simple(live)

    def _conditional(self, live: bool | None) -> Iterator[Command]:
        """Follows `if`, `while` and `until`; the body of a loop is followed once."""
        kind, rest, own = self._raw(), live, live
        while self._take(kind, "elif"):
            yield from self.run(rest, *_OPENS[kind])
            status = self.status if kind != "until" or self.status is None else not self.status
            own = _and(rest, status)
            rest = _and(rest, None if status is None else not status)
            self._take(*_OPENS[kind])
            yield from self.run(own, "elif", "else", "fi", "done")
        if self._take("else"):
            yield from self.run(rest, "fi")
        self._take("fi", "done")
        self.status = True

    def _for(self, live: bool | None) -> Iterator[Command]:
        """Follows a loop once: a variable with several values has none that is known."""
        self.at += 1
        name, start = self._raw(), self.at + 2
        while self.at < len(self.tokens) and self._raw() != "do":
            self.at += 1
        words = self._expanded([token for token in self.tokens[start : self.at] if token.kind == "word"])
        if len(words) == 1 or not words:
            self._assign({name: words}, live if words else None)
        else:
            computed = f"${name}, which has {len(words)} values in a loop"
            self._assign({name: (replace(words[0], computed=computed),)}, live)
        self._take("do")
        yield from self.run(live, "done")
        self._take("done")

    def _case(self, live: bool | None) -> Iterator[Command]:
        self.at += 1
        subject = self._expanded([self.tokens[self.at]]) or (Word(text="", place=self.tokens[self.at].place),)
        while self.at < len(self.tokens) and not self._take("in"):
            self.at += 1
        rest = live
        while self.at < len(self.tokens) and not self._take("esac"):
            patterns = []
            while self.at < len(self.tokens) and not self._take(")"):
                patterns += [self.tokens[self.at]] if self.tokens[self.at].kind == "word" else []
                self.at += 1
            texts = [word.text for word in self._expanded(patterns)]
            fits = any(fnmatch.fnmatchcase(subject[0].text, text) for text in texts)
            status = None if subject[0].computed else fits
            yield from self.run(_and(rest, status), ";;", ";&", ";;&", "esac")
            rest = _and(rest, None if status is None else not status)
            self._take(";;", ";&", ";;&")
            while self._take("\n"):
                pass
        self.status = True

    def _function(self) -> None:
        self._take("function")
        name = self._raw()
        self.at += 1
        while self._take("(", ")", "\n"):
            pass
        self.functions[name] = self.at
        for _ in self._command(False):
            pass

    def _test(self) -> None:
        """Evaluates `[[ … ]]`."""
        start = self.at + 1
        while self.at < len(self.tokens) and self._raw() != "]]":
            self.at += 1
        tokens = self.tokens[start : self.at]
        self.at += 1
        groups: list[list[str]] = [[]]
        operators = []
        for token in tokens:
            if token.raw in ("&&", "||"):
                operators.append(token.raw)
                groups.append([])
            elif token.kind == "word":
                groups[-1].append(self._tested(token))
            else:
                groups[-1].append(token.raw)
        status = _tested(groups[0])
        for operator, group in zip(operators, groups[1:], strict=True):
            other = _tested(group)
            status = _and(status, other) if operator == "&&" else _or(status, other)
        self.status = status

    def _tested(self, token: _Token) -> str:
        """Returns a word of a test; a variable that nobody has set is empty."""
        words = expanded(token.raw, token.place, self.values, is_split=False, unset="")
        return _UNKNOWN if any(word.computed for word in words) else " ".join(word.text for word in words)

    def _simple(self, live: bool | None) -> Iterator[Command]:
        assigned, tokens, is_start = dict[str, tuple[Word, ...]](), list[_Token](), True
        while self.at < len(self.tokens) and (self.tokens[self.at].kind != "operator"):
            token = self.tokens[self.at]
            self.at += 1
            match = _ASSIGNMENT.fullmatch(token.raw)
            if token.kind == "redirection":
                self.at += not self._raw().isspace()
            elif match and (is_start or tokens[0].raw in _DECLARES):
                # `name+=(…)` appends
                before = self.values.known.get(match[1], ()) if match[2] else ()
                assigned[match[1]] = (*before, *self._assigned(match[3], token))
            elif is_start and token.raw in _DECLARES:
                tokens.append(token)
            else:
                is_start = False
                tokens.append(token)
        # `env` runs what follows it; export and its kind assign and run nothing
        if tokens and tokens[0].raw in _DECLARES:
            tokens = tokens[1:] if tokens[0].raw == "env" else []
        if not tokens:
            # without a command assignments stay; before one they are its environment alone
            self._assign(assigned, live)
            self.status = True
        elif tokens[0].raw in ("[", "test"):
            end = -1 if tokens[0].raw == "[" else None
            self.status = _tested([self._tested(token) for token in tokens[1:end]])
        else:
            yield from self._called(self._expanded(tokens), assigned, live)

    def _assigned(self, raw: str, token: _Token) -> tuple[Word, ...]:
        """Returns the value of an assignment; the words of an array, which stand between parentheses."""
        if raw or self._raw() != "(" or not self.tokens[self.at].is_adjacent:
            place = replace(token.place, column=(token.place.column or 1) + len(token.raw) - len(raw))
            words = expanded(raw, place, self.values, is_split=False)
            return tuple(words) or (Word(text="", place=place),)
        self.at += 1
        start = self.at
        while self.at < len(self.tokens) and self._raw() != ")":
            self.at += 1
        self.at += 1
        return self._expanded([token for token in self.tokens[start : self.at - 1] if token.kind == "word"])

    def _called(
        self, words: tuple[Word, ...], assigned: Mapping[str, tuple[Word, ...]], live: bool | None
    ) -> Iterator[Command]:
        """Yields a command, or the commands of the function or the text that it names."""
        texts = [word.text for word in words]
        if live is False or not texts:
            return
        self.status = {"true": True, ":": True, "false": False}.get(texts[0])
        body = self.functions.get(texts[0])
        inner = " ".join(texts[1:]) if texts[0] == "eval" else _text_of_shell(texts)
        if body is not None and self.depth < 9:
            at, args = self.at, self.values.args
            self.at, self.values.args, self.depth = body, words[1:], self.depth + 1
            yield from self._command(live)
            self.at, self.values.args, self.depth = at, args, self.depth - 1
        elif inner is not None and not any(word.computed for word in words):
            tokens = tuple(_tokens(inner, words[0].place.file, words[-1].place))
            yield from _Reader(tokens=tokens, values=self.values, own=self.own).run(live)
        else:
            own = {name: value[0] for name, value in assigned.items() if value}
            yield Command(words=words, environment={**self.own, **own})

    def _assign(self, assigned: Mapping[str, tuple[Word, ...]], live: bool | None) -> None:
        """Sets variables; under a condition that is not known, their values are not known either."""
        for name, words in assigned.items():
            before = [word.text for word in self.values.known.get(name, ())]
            if live is False or (live is None and before == [word.text for word in words]):
                continue
            if live is None:
                line = words[0].place.line if words else self.tokens[self.at - 1].place.line
                text, place = (words[0].text, words[0].place) if words else ("", self.tokens[self.at - 1].place)
                words = (Word(text=text, place=place, computed=f"${name}, which line {line} sets under a condition"),)
            self.values.known[name] = words
            self.own |= {name: words[0]} if words else {}

    def _expanded(self, tokens: Sequence[_Token]) -> tuple[Word, ...]:
        """Returns words as bash passes them on, without a blank that a backslash keeps at the end of a line."""
        return tuple(
            word
            for token in tokens
            if token.raw.strip("\\ \t\r")
            for word in expanded(token.raw, token.place, self.values)
        )


def _text_of_shell(texts: Sequence[str]) -> str | None:
    """Returns the script in `bash -c '…'`, also behind other programs; None for other commands."""
    for at, text in enumerate(texts[:-2]):
        if text.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", texts[at + 1]):
            return texts[at + 2]
    return None


def _and(one: bool | None, other: bool | None) -> bool | None:
    return False if one is False or other is False else None if one is None or other is None else True


def _or(one: bool | None, other: bool | None) -> bool | None:
    return True if one is True or other is True else None if one is None or other is None else False


def _both(live: bool | None, operator: str, status: bool | None) -> bool | None:
    """Returns whether bash gets to the command behind `&&` or `||`; a program is taken to succeed."""
    if operator == "&&":
        return live if status is None else _and(live, status)
    return _and(live, None if status is None else not status) if status is not None else False


_UNKNOWN = "\0"
_COMPARISONS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def _tested(words: Sequence[str]) -> bool | None:
    """Returns whether a test holds; None if only the machine can tell."""
    match list(words):
        case ["!", *rest]:
            status = _tested(rest)
            return None if status is None else not status
        case [_, *rest] if "-a" in rest or "-o" in rest:
            at = next(at for at, word in enumerate(words) if at and word in ("-a", "-o"))
            join = _and if words[at] == "-a" else _or
            return join(_tested(words[:at]), _tested(words[at + 1 :]))
        case [*rest] if _UNKNOWN in rest:
            return None
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [one, "=" | "==", other]:
            return fnmatch.fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatch.fnmatchcase(one, other)
        case [one, operator, other] if operator in _COMPARISONS:
            numbers = [text.strip().lstrip("-").isdigit() for text in (one, other)]
            return _COMPARISONS[operator](int(one), int(other)) if all(numbers) else None
    return None
