"""The tables of docs/advisories.md: every known fault, and what the cases answered under two releases."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.advisories.run import CASES_IN_ORDER, Shown, table
from dstrain.config.lint.advisories import ADVISORIES

RESULTS = Path(__file__).resolve().parents[1] / "results" / "advisories.json"
"""The stored answers, written by `run.py --json`."""


def results() -> dict[str, Shown]:
    """Returns the stored answers, by case."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {
        name: Shown(case=name, versions=tuple(found["versions"]), answers=tuple(found["answers"]))
        for name, found in stored.items()
    }


def faults() -> str:
    """Returns a row for every advisory."""
    rows = ["| rule | settings | DeepSpeed | effect | if the release must stay | source |", "|---|---|---|---|---|---|"]
    for row in ADVISORIES:
        shown = f", [shown](#{row.script.replace('_', '-')})" if row.script else ""
        releases = f"{row.since or '…'} to before {row.fixed}"
        cells = (row.id, row.settings, releases, f"{row.kind}: {row.effect}", row.otherwise)
        rows.append(f"| {' | '.join(cells)} | [#{row.pull}]({row.source}){shown} |")
    return "\n".join(rows)


def outputs() -> str:
    """Returns the answers of every case under both releases."""
    found = results()
    parts = [f"### {case.name.replace('_', ' ')}\n\n{table(found[case.name])}" for case in CASES_IN_ORDER]
    return "\n\n".join(parts)
