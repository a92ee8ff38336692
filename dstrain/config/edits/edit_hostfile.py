"""Edits a hostfile in place: a host's name is the key, its slots are the value."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstrain.config.document import REMOVED, UNCHANGED, Change
from dstrain.config.jsonc import newline_of

_LINE = re.compile(r"^[ \t]*(?P<host>[^\s#]\S*)[ \t]+slots=(?P<slots>[0-9]+)[ \t]*$")


def apply(text: str, changes: Sequence[Change]) -> str:
    """Returns the text with the changes made, one after another.

    >>> apply("# two\\na slots=8\\nb slots=8\\n", [Change(pointer=("b",), value=4)])
    '# two\\na slots=8\\nb slots=4\\n'
    """
    for change in changes:
        text = _changed(text, change)
    return text


def _changed(text: str, change: Change) -> str:
    host = str(change.pointer[0])
    lines = text.splitlines(keepends=True)
    places = {match["host"]: at for at, line in enumerate(lines) if (match := _LINE.match(line.rstrip("\r\n")))}
    at = places.get(host)
    if change.value is REMOVED:
        return "".join(lines[:at] + lines[at + 1 :]) if at is not None else text
    if at is None:
        return text if change.value is UNCHANGED else _added(text, lines, places, change)
    found = _LINE.match(lines[at].rstrip("\r\n"))
    assert found is not None, "the line was found so"
    line = lines[at]
    if change.value is not UNCHANGED:
        line = line[: found.start("slots")] + str(change.value) + line[found.end("slots") :]
    if change.renamed is not None:
        line = line[: found.start("host")] + change.renamed + line[found.end("host") :]
    lines[at] = line
    return "".join(lines)


def _added(text: str, lines: list[str], places: dict[str, int], change: Change) -> str:
    newline = newline_of(text)
    order = list(places) if change.after is None else [each for each in change.after if each in places]
    # the first host is rank 0's: only what is generated first is put before it
    otherwise = len(lines) if change.after else min(places.values(), default=len(lines))
    at = places[order[-1]] + 1 if order else otherwise
    if at > 0 and not lines[at - 1].endswith("\n"):
        lines[at - 1] += newline
    return "".join([*lines[:at], f"{change.pointer[0]} slots={change.value}{newline}", *lines[at:]])
