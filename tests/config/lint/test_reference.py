"""docs/lint.md has what the rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.config.lint.engine import RULES
from dstrain.launch.prepare.checks import ABSENT
from dstrain.launch.prepare.lint_job import OUTSIDE

PAGE = Path(__file__).parents[3] / "docs" / "lint.md"
START = "<!-- generated: rules -->\n"


def severity_of(name: str) -> str:
    """Returns the severity of a rule that applies without a parsable ds_config.json."""
    return "warning" if name == ABSENT else "error"


def reference() -> str:
    """Returns a row for every rule."""
    rows = {rule.id: f"{rule.severity} | {rule.title}" for rule in RULES}
    rows |= {name: f"{severity_of(name)} | {title}" for name, title in OUTSIDE.items()}
    lines = ["| rule | severity | about |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {rows[name]} |" for name in sorted(rows))])


def test_the_page_is_what_the_rules_say(request: pytest.FixtureRequest) -> None:
    preamble, _, present = PAGE.read_text(encoding="utf-8").partition(START)
    wanted = f"{reference()}\n"
    if request.config.getoption("--update"):
        PAGE.write_text(preamble + START + wanted, encoding="utf-8")
    else:
        assert present == wanted, "run pytest --update"
