"""Docstrings keep to docs/style.md, in the packages that are clean already."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import nodes_of

ROOT = Path(__file__).parent.parent
CLEAN = (
    "dstrain/_data",
    "dstrain/child_process.py",
    "dstrain/choices.py",
    "dstrain/cli",
    "dstrain/config",
    "dstrain/doctor",
    "dstrain/errors.py",
    "dstrain/facts",
    "dstrain/findings.py",
    "dstrain/garbage.py",
    "dstrain/heartbeat.py",
    "dstrain/job",
    "dstrain/launch",
    "dstrain/monitor",
    "dstrain/oom.py",
    "dstrain/paths.py",
    "dstrain/plan/calibration.py",
    "dstrain/plan/configuration.py",
    "dstrain/plan/estimate.py",
    "dstrain/plan/estimate_records.py",
    "dstrain/plan/labels.py",
    "dstrain/plan/memory",
    "dstrain/plan/named_parts.py",
    "dstrain/plan/next_run.py",
    "dstrain/plan/request.py",
    "dstrain/plan/rope_scaling.py",
    "dstrain/plan/run_time.py",
    "dstrain/plan/search/alternatives.py",
    "dstrain/plan/search/infeasible.py",
    "dstrain/plan/search/out_of_memory.py",
    "dstrain/plan/search/rules.py",
    "dstrain/plan/speed",
    "dstrain/plan/training_code.py",
    "dstrain/monitor/outcomes.py",
    "dstrain/records.py",
    "dstrain/removed.py",
    "dstrain/report",
    "dstrain/rundir.py",
    "dstrain/train",
    "dstrain/units.py",
    "dstrain/wrapping.py",
)
"""Packages and modules whose docstrings have none of the patterns below; the list only grows."""
FORBIDDEN = {
    "what as a noun: name the thing": re.compile(
        r"^(?:(?:Returns|Yields|Says|Tells|Names|Reads|Writes|Prints|Compares|Finds) )?[Ww]hat\b|[.;:] [Ww]hat\b"
    ),
    "those of, that of: name the thing, or write a possessive": re.compile(r"\b(?:[Tt]hose|[Tt]hat) of\b"),
    "where for a condition: if": re.compile(
        r"\b(?:[Ww]here (?:it|they|none|nothing|no)|(?:None|empty|nothing|Raises \w+) where)\b"
    ),
    "there is not: a subject and a verb": re.compile(r"\b(?:there (?:is|are) not|that there (?:is|are))\b"),
    "the most, at the most: at most, the largest": re.compile(r"\bat the most\b"),
}
"""What is wrong, and what to write → its pattern."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each docstring: of the module, its classes, functions, fields and constants."""
    for node in nodes_of(path):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def modules(name: str) -> list[Path]:
    """Returns the modules of a package, or the module of that name."""
    path = ROOT / name
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def faults(path: Path) -> list[str]:
    """Returns each line of a docstring that has a forbidden pattern, with the reason."""
    return [
        f"{path.relative_to(ROOT)}:{line + at}: {reason}: {text.strip()}"
        for line, docstring in docstrings(path)
        for at, text in enumerate(docstring.splitlines())
        for reason, pattern in FORBIDDEN.items()
        if pattern.search(text.strip())
    ]


@pytest.mark.parametrize("name", CLEAN)
def test_docstrings_are_plain_english(name: str) -> None:
    assert modules(name)
    assert [fault for path in modules(name) for fault in faults(path)] == []


def test_every_clean_name_exists() -> None:
    assert [name for name in CLEAN if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("Names the advantage of the chosen plan.", True),
        ("What a rank writes.", False),
        ("Returns what the plan says.", False),
        ("The width of a query head, and that of a value head.", False),
        ("Returns the hosts; None where the job has none.", False),
        ("Raises InvalidConfig for a rule that there is not.", False),
        ("The folder where checkpoints are written.", True),
    ],
)
def test_the_patterns_find_what_the_page_forbids(text: str, is_plain: bool) -> None:
    assert any(pattern.search(text) for pattern in FORBIDDEN.values()) != is_plain
