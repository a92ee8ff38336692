"""Says which other format a file has that is read as JSON lines, with the command that makes JSON lines of it."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import NamedTuple

from dstrain.errors import InvalidConfig, merge_hint

_READ_BYTES = 2**20
"""Bytes of a file in which the object of several lines is looked for."""
_ONE = "a .jsonl file has one object a line"
_KINDS = (
    (b"\x1f\x8b", "is compressed by gzip", "Uncompress it: gunzip < {file} > {new}"),
    (b"(\xb5/\xfd", "is compressed by zstd", "Uncompress it: zstd -d < {file} > {new}"),
    (b"PK\x03\x04", "is a zip archive", "Unpack it: unzip {file}"),
    (b"PAR1", "is Parquet", "Name it so: mv {file} {stem}.parquet"),
    (b"\xff\xfe", "is UTF-16", "Save it as UTF-8: iconv -f UTF-16 -t UTF-8 {file} > {new}"),
    (b"\xfe\xff", "is UTF-16", "Save it as UTF-8: iconv -f UTF-16 -t UTF-8 {file} > {new}"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data", "Fetch the data: git lfs pull"),
    (b"<!doctype html", "is a web page", "Download the file itself, not the page that shows it."),
    (b"<html", "is a web page", "Download the file itself, not the page that shows it."),
)
"""First bytes → what a file is, and its fix."""
_SPLIT = "jq -c . {file} > {new}"
_REPR = "is written by Python, with single quotes and True, False, None; JSON has double quotes and true, false, null"


def _from_python(texts: str) -> str:
    """Returns the command that makes JSON of Python's literals, given the expression of their texts."""
    made = f"[print(json.dumps(row)) for text in {texts} for row in rows(ast.literal_eval(text))]"
    rows = "rows = lambda value: value if isinstance(value, list) else [value]"
    return f'Convert it: python3 -c "import ast, json, sys; {rows}; {made}" < {{file}} > {{new}}'


class _Form(NamedTuple):
    """Form of a line that is not JSON."""

    problem: str
    hint: str
    is_of_file: bool = False
    """Whether no line of the file is a row."""


def other_kind(path: Path) -> InvalidConfig | None:
    """Returns the error of a file of another kind, by its first bytes, or None."""
    with path.open("rb") as file:
        start = file.read(64).lower()
    for magic, what, fix in _KINDS:
        if start.startswith(magic.lower()):
            return InvalidConfig(f"{path}: {what}", hint=_filled(fix, path))
    return None


def error_of(path: Path, where: str, line: bytes, start: int, error: ValueError) -> InvalidConfig:
    """Returns the error of a line that is no JSON, which begins at a byte of its file.

    Raises it if no line of the file is a row: an object takes several.
    """
    form = _form(path, line, start)
    if form is None:
        return _plain(where, error)
    found = InvalidConfig(f"{where}: {form.problem}", hint=_filled(form.hint, path))
    if form.is_of_file and start == 0:
        raise found
    return found


def error_in_list(path: Path, text: str, error: json.JSONDecodeError) -> InvalidConfig:
    """Returns the error of a file that begins as a JSON list."""
    if isinstance(_python(text), list):
        return InvalidConfig(f"{path}: {_REPR}", hint=_filled(_from_python("[sys.stdin.read()]"), path))
    return _plain(f"{path}:{error.lineno}", error)


def within_text(path: Path, value: str) -> str | None:
    """Returns the hint for a line that is a string with JSON in it, or None."""
    return _filled("Unpack the text: jq -c fromjson {file} > {new}", path) if _begins(value)[0] else None


def _plain(where: str, error: ValueError) -> InvalidConfig:
    if not isinstance(error, json.JSONDecodeError):
        return InvalidConfig(f"{where}: {error}")
    return InvalidConfig(f"{where}:{error.colno}: {error.msg[:1].lower()}{error.msg[1:]}")


def _form(path: Path, line: bytes, start: int) -> _Form | None:
    """Returns the form of a line that is no JSON, or None if it is no known one."""
    text = line.decode("utf-8", errors="replace").strip()
    if (hint := merge_hint(text)) is not None:
        return _Form("is a mark of a merge conflict", hint)
    if not text.startswith("{"):
        return None
    value, rest = _begins(text)
    if isinstance(value, dict) and rest == ",":
        return _Form(f"a comma follows the object; {_ONE}", "Remove commas: sed 's/,[[:space:]]*$//' {file} > {new}")
    if isinstance(value, dict) and rest.startswith("{"):
        return _Form(f"has several objects; {_ONE}", f"Split them: {_SPLIT}")
    if isinstance(_python(text), dict):
        return _Form(_REPR, _from_python("filter(str.strip, sys.stdin)"))
    if text.startswith("{'"):
        return _Form("has single quotes; JSON has double quotes", "Write rows with a JSON library: json.dumps(row).")
    if (spread := _spread(path, start)) is not None:
        return spread
    if start + len(line) >= path.stat().st_size and not line.endswith(b"\n"):
        return _Form("the file ends in the middle of this row", "Copy or write it again, or remove this line.")
    return None


def _spread(path: Path, start: int) -> _Form | None:
    """Returns the form of an object that begins at a byte and ends in another line, or None."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(_READ_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    value, rest = _begins(text)
    if not isinstance(value, dict):
        return None
    lists = [name for name, items in value.items() if isinstance(items, list) and items and isinstance(items[0], dict)]
    problem = f"an object takes several lines; {_ONE}"
    if len(lists) == 1 and not rest:
        return _Form(
            f'the rows are in "{lists[0]}"; {_ONE}', f"Take them out: jq -c '.{lists[0]}[]' {{file}} > {{new}}", True
        )
    if rest.startswith(","):
        return _Form(problem, "Join its lines: (echo '['; cat {file}; echo ']') | jq -c '.[]' > {new}", True)
    return _Form(problem, f"Join its lines: {_SPLIT}", True)


def _begins(text: str) -> tuple[object, str]:
    """Returns the JSON value with which a text begins, and the rest; None if it begins with none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:].strip()


def _python(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _filled(fix: str, path: Path) -> str:
    names = {"file": path, "new": path.with_name(f"fixed-{path.name}"), "stem": path.with_suffix("")}
    for name, value in names.items():
        fix = fix.replace(f"{{{name}}}", shlex.quote(str(value)))
    return fix
