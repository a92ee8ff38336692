"""Edits generated files in place and keeps comments and formatting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from dstrain.config import jsonc
from dstrain.config.document import Change, applied, dotted, same
from dstrain.config.edits import edit_hostfile, edit_json, edit_yaml
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import hostfile
from dstrain.job.file import TEXTS
from dstrain.job.yaml_source import parse_yaml

_BOM = "\ufeff"


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
    return edit_hostfile.apply(text, changes)
