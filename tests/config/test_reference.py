"""docs/ds_config.md has what the table of keys says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dstrain.config.key_text import default_text, kind_text, summary
from dstrain.config.keys.key import Key, Kind
from dstrain.config.keys.table import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "ds_config.md"
START = "<!-- generated: keys -->\n"
HEAD = '| key | type | default | "auto" is | since | what it does |\n|---|---|---|---|---|---|'
GONE = "| key | gone since | instead | what it did |\n|---|---|---|---|"


def reference() -> str:
    """Returns a table for the top and for every section, and one of what is gone."""
    live = [key for key in ROWS if key.removed is None]
    sections = [key for key in live if key.kind is Kind.OBJECT and "." not in key.path]
    top = [key for key in live if "." not in key.path and key not in sections]
    parts = [f"## Top level\n\n{_table(top, '')}"]
    for section in sorted(sections, key=lambda key: key.path):
        rows = [key for key in live if key.path.startswith(f"{section.path}.")]
        text = f"## `{section.path}`\n\n{_meaning(section)}"
        parts.append(f"{text}\n\n{_table(rows, f'{section.path}.')}" if rows else text)
    gone = [
        _row(f"`{key.path}`", key.removed or "", key.instead or "", summary(key))
        for key in ROWS
        if key.removed is not None
    ]
    return "\n\n".join([*parts, "## Gone\n\n" + "\n".join([GONE, *gone])])


def _table(keys: Iterable[Key], prefix: str) -> str:
    rows = [
        _row(
            f"`{key.path.removeprefix(prefix)}`",
            kind_text(key),
            default_text(key) or "",
            key.filled or "",
            key.since or "",
            _meaning(key),
        )
        for key in keys
    ]
    return "\n".join([HEAD, *rows])


def _meaning(key: Key) -> str:
    return summary(key) + (f" Deprecated: {key.instead}." if key.instead else "")


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|").replace("*", "\\*") if "`" not in cell else cell for cell in cells)
    return f"| {' | '.join(escaped)} |"


def test_the_page_is_what_the_table_says(request: pytest.FixtureRequest) -> None:
    preamble, _, present = PAGE.read_text(encoding="utf-8").partition(START)
    wanted = f"{reference()}\n"
    if request.config.getoption("--update"):
        PAGE.write_text(preamble + START + wanted, encoding="utf-8")
    else:
        assert present == wanted, "run pytest --update"


def test_every_key_has_a_row() -> None:
    assert reference().count("\n| `") == len(ROWS) - len(
        [key for key in ROWS if key.kind is Kind.OBJECT and "." not in key.path and key.removed is None]
    )
