"""Edits a hostfile in place: the key is a host's name, the value its slots."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstrain.config.document import REMOVED, UNCHANGED, Change, Mark
from dstrain.config.jsonc import newline_of

_LINE = re.compile(r"^[ \t]*(?P<host>[^\s#]\S*)[ \t]+slots=(?P<slots>[0-9]+)[ \t]*$")


def apply(text: str, changes: Sequence[Change]) -> str:
    """Returns the text after the changes, which are applied in order.

    >>> apply("# two\\na slots=8\\nb slots=8\\n", [Change(pointer=("b",), value=4)])
    '# two\\na slots=8\\nb slots=4\\n'
    """
    for change in changes:
        text = _changed(text, change)
    return text


def _changed(text: str, change: Change) -> str:
    host = str(change.pointer[0])
    lines = text.splitlines(keepends=True)
    matches = {
        match["host"]: (at, match) for at, line in enumerate(lines) if (match := _LINE.match(line.rstrip("\r\n")))
    }
    if host not in matches:
        places = {name: at for name, (at, _) in matches.items()}
        return _added(text, lines, places, change) if not isinstance(change.value, Mark) else text
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


def _added(text: str, lines: list[str], places: dict[str, int], change: Change) -> str:
    newline = newline_of(text)
    order = list(places) if change.after is None else [host for host in change.after if host in places]
    # the first host runs rank 0: only a host that is generated first goes before it
    otherwise = len(lines) if change.after else min(places.values(), default=len(lines))
    at = places[order[-1]] + 1 if order else otherwise
    if at > 0 and not lines[at - 1].endswith("\n"):
        lines[at - 1] += newline
    return "".join([*lines[:at], f"{change.pointer[0]} slots={change.value}{newline}", *lines[at:]])
