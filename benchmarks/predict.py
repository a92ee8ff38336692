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

from benchmarks.published import half_report, ranges, report
from benchmarks.published.answers import Answer, answer, is_bound
from benchmarks.published.figures import predicted, read_csv
from benchmarks.published.halves import HALVES, Half, read_halves, split, to_csv
from benchmarks.published.out_of_sample import HalfScore, half_score
from benchmarks.published.rows import Row, read
from benchmarks.published.scope import BOUND, excluded, is_asked
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
    if options.write_halves:
        HALVES.write_text(to_csv(split(rows, read_halves())), encoding="utf-8")
        print(f"{HALVES} written", file=sys.stderr)
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
    elif options.ranges:
        print(ranges.as_code(ranges.error_ranges(answers, halves_of(answers))))
    elif options.markdown:
        print(half_report.markdown(*both_halves(answers)) + "\n\n" + report.markdown(score(answers)))
    else:
        print(report.text(score(answers)) + "\n\n" + half_report.text(*both_halves(answers)))
    return 0


def halves_of(answers: Sequence[Answer]) -> dict[str, Half]:
    """Returns the half of each table, by the file or, if a table is new, by the rule."""
    return split([one.row for one in answers], read_halves())


def later_answers() -> list[Answer]:
    """Returns the stored predictions of the runs that were published after the split, with which no constant is set."""
    stored = read_csv(PUBLISHED / "later_predicted.csv")
    return [answer(row, stored.get(row.id)) for row in read(PUBLISHED / "later_runs.csv")]


def both_halves(answers: Sequence[Answer]) -> tuple[HalfScore, HalfScore]:
    """Returns the scores of the half on which constants are set, and of the unseen one."""
    halves = halves_of(answers)
    return half_score(answers, halves, Half.FIT), half_score(answers, halves, Half.UNSEEN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=PUBLISHED / "published_runs.csv", help="table of published runs")
    parser.add_argument("--json", type=Path, help="write the score and every comparison to this file")
    parser.add_argument("--markdown", action="store_true", help="print all tables in Markdown")
    parser.add_argument("--ranges", action="store_true", help="print the ranges of dstrain/plan/speed/step_time.py")
    parser.add_argument("--worst", type=int, metavar="N", help="print the N comparisons that are furthest off")
    parser.add_argument(
        "--explain", metavar="ID", help="print one row: the question, the prediction and the measurement"
    )
    parser.add_argument(
        "--write-scope", type=Path, metavar="FILE", help="write the rows out of scope, with the reasons"
    )
    parser.add_argument("--write-halves", action="store_true", help=f"add new tables to {HALVES.name}")
    return parser


def scope_csv(rows: Sequence[Row]) -> str:
    """Returns the rows that cannot be asked fairly, as CSV: id, what (memory, speed, all, one side), reason."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["id", "what", "reason"])
    for row in rows:
        exclusion = excluded(row)
        if exclusion is not None:
            writer.writerow([row.id, *exclusion])
        if is_bound(row) and is_asked(row):
            writer.writerow([row.id, "one side", BOUND])
    return out.getvalue()


def as_data(answers: Sequence[Answer]) -> dict[str, object]:
    """Returns score and comparisons as plain data."""
    compared = [comparison for one in answers for comparison in (*one.memory, one.speed) if comparison is not None]
    return {
        "schema": 1,
        "score": asdict(score(answers)),
        "halves": [asdict(half) for half in both_halves(answers)],
        "comparisons": [{**asdict(comparison), "error_ratio": comparison.error_ratio} for comparison in compared],
        "verdicts": [asdict(one.verdict) for one in answers if one.verdict is not None],
    }


if __name__ == "__main__":
    sys.exit(main())
