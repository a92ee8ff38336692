"""Edits generated files in place and keeps comments and formatting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from dstrain.config import jsonc
from dstrain.config.document import REMOVED, UNCHANGED, Change, Mark, applied, dotted, same
from dstrain.config.edits import edit_json, edit_yaml
from dstrain.config.jsonc import newline_of
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import hostfile
from dstrain.job.file import TEXTS
from dstrain.job.yaml_source import parse_yaml

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
        return bom + edit_yaml.apply(text.removeprefix(_BOM), name, changes)
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
