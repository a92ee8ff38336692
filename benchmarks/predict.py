"""Scores the planner on published measurements: memory, whether a run fits, throughput.

Examples: python benchmarks/predict.py
          python benchmarks/predict.py --csv other.csv --worst 20
          python benchmarks/predict.py --explain fms-a-32
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from benchmarks.published import report
from benchmarks.published.answers import Answer, answer
from benchmarks.published.figures import predicted
from benchmarks.published.rows import Row, read
from benchmarks.published.scope import excluded
from benchmarks.published.score import score

PUBLISHED = Path(__file__).parents[1] / "tests" / "published"
"""Where the table, the models' shapes, the scope and the stored predictions are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    rows = read(options.csv)
    if options.write_scope:
        options.write_scope.write_text(scope_csv(rows), encoding="utf-8")
        print(f"{options.write_scope} written", file=sys.stderr)
        return 0
    if options.explain:
        chosen = [row for row in rows if row.id == options.explain]
        if not chosen:
            print(f"{options.csv} has no row {options.explain}", file=sys.stderr)
            return 2
        print(report.explain(chosen[0]))
        return 0
    answers = [answer(row, predicted(row)) for row in rows]
    if options.json:
        options.json.write_text(json.dumps(as_data(answers), indent=1) + "\n", encoding="utf-8")
    if options.worst:
        print(report.worst(answers, options.worst))
    elif options.markdown:
        print(report.markdown(score(answers)))
    else:
        print(report.text(score(answers)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=PUBLISHED / "published_runs.csv", help="table of published runs")
    parser.add_argument("--json", type=Path, help="write the score and every comparison to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/accuracy.md")
    parser.add_argument("--worst", type=int, metavar="N", help="print the N comparisons that are furthest off")
    parser.add_argument(
        "--explain", metavar="ID", help="print one row: the question, the prediction and the measurement"
    )
    parser.add_argument(
        "--write-scope", type=Path, metavar="FILE", help="write the rows out of scope, with the reasons"
    )
    return parser


def scope_csv(rows: Sequence[Row]) -> str:
    """Returns the rows that are out of scope, as CSV: id, what (memory, speed, all), reason."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["id", "what", "reason"])
    for row in rows:
        exclusion = excluded(row)
        if exclusion is not None:
            writer.writerow([row.id, *exclusion])
    return out.getvalue()


def as_data(answers: Sequence[Answer]) -> dict[str, object]:
    """Returns score and comparisons as plain data."""
    compared = [comparison for one in answers for comparison in (*one.memory, one.speed) if comparison is not None]
    return {
        "schema": 1,
        "score": asdict(score(answers)),
        "comparisons": [{**asdict(comparison), "error_ratio": comparison.error_ratio} for comparison in compared],
        "verdicts": [asdict(one.verdict) for one in answers if one.verdict is not None],
    }


if __name__ == "__main__":
    sys.exit(main())
