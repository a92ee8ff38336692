"""docs/ds_config.md has what the table of keys says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dstrain.config.keys import ROWS, Key, Kind, default_text, summary

PAGE = Path(__file__).parents[2] / "docs" / "ds_config.md"
START = "<!-- generated: keys -->\n"
HEAD = '| key | default | "auto" is | what it does |\n|---|---|---|---|'
GONE = "| key | gone since | instead |\n|---|---|---|"
COMMON = {
    "activation_checkpointing",
    "bf16",
    "checkpoint",
    "fp16",
    "optimizer",
    "scheduler",
    "tensor_parallel",
    "zero_optimization",
}
"""Sections whose keys have rows; those of the others are named."""


def reference() -> str:
    """Returns a table for the top and for every common section, the names in the others, and one of what is gone."""
    live = [key for key in ROWS if key.removed is None]
    sections = [key for key in live if key.kind is Kind.OBJECT and "." not in key.path]
    top = [key for key in live if "." not in key.path and key not in sections]
    parts = [f"## Top level\n\n{_table(top, '')}"]
    for section in sorted(sections, key=lambda key: key.path):
        rows = [key for key in live if key.path.startswith(f"{section.path}.")]
        text = f"## `{section.path}`\n\n{_meaning(section)}"
        written = _table if section.path in COMMON else _names
        parts.append(f"{text}\n\n{written(rows, f'{section.path}.')}" if rows else text)
    gone = [_row(f"`{key.path}`", key.removed or "", key.instead or "") for key in ROWS if key.removed is not None]
    return "\n\n".join([*parts, "## Gone\n\n" + "\n".join([GONE, *gone])])


def _table(keys: Iterable[Key], prefix: str) -> str:
    rows = [
        _row(f"`{key.path.removeprefix(prefix)}`", default_text(key) or "", key.filled or "", _meaning(key))
        for key in keys
    ]
    return "\n".join([HEAD, *rows])


def _names(keys: Iterable[Key], prefix: str) -> str:
    return ", ".join(f"`{key.path.removeprefix(prefix)}`" for key in keys)


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


def test_every_key_is_on_the_page() -> None:
    page = reference()
    assert [key.path for key in ROWS if not any(f"`{key.path.split('.', at)[-1]}`" in page for at in (0, 1))] == []
