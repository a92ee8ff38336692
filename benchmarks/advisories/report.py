"""The table of docs/advisories.md, and the stored answers of the cases under two releases."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.advisories.run import Shown
from dstrain.config.lint.rules.releases import ADVISORIES

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
    """Returns a row for every advisory; those with a case have a mark."""
    rows = ["| rule | settings | DeepSpeed | effect | if the release must stay | source |", "|---|---|---|---|---|---|"]
    for row in ADVISORIES:
        shown = " \\*" if row.script else ""
        releases = f"{row.since or '…'} to before {row.fixed}"
        cells = (row.id, row.settings, releases, f"{row.kind}: {row.effect}", row.otherwise)
        rows.append(f"| {' | '.join(cells)} | [#{row.pull}]({row.source}){shown} |")
    return "\n".join(rows)
