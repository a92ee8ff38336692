"""The exam of the health rules.

Examples: python -m benchmarks.health_exam            (replays the recorded runs: seconds)
          python -m benchmarks.health_exam --record   (records them again: a quarter of an hour on two idle cores)
          python -m benchmarks.health_exam --record --only slow-rank
          python -m benchmarks.health_exam --record --only small-bucket   (one of the whole runs)
          python -m benchmarks.health_exam --gallery docs/gallery   (writes the report pages of a few)

Ranks that record ask for real-time scheduling, which root gets: other processes of the machine wait meanwhile. Those of
whole runs do not; with --shared none does, and nothing is kept of times and of the machine's RAM: for causes that are
not about these.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.health_exam.score import (
    FOLDER,
    Result,
    cause_table,
    false_per_1000,
    replay,
    rule_table,
)
from benchmarks.health_exam.traces import all_traces
from benchmarks.health_exam.whole_runs import WHOLE_RUNS


def describe(title: str, results: Sequence[Result]) -> None:
    """Prints the tables of some runs."""
    print(f"\n{title}: {len(results)} runs, {sum(result.steps for result in results):,} steps")
    print(cause_table(results))
    print()
    print(rule_table(results))
    print(f"\nfalse warnings in 1,000 steps: {false_per_1000(results):.2f}")
    for result in results:
        for finding in result.false:
            print(f"  {result.trace.name} step {finding.step}: {finding.rule} {finding.value}")


def main() -> None:
    """Records, if asked, and prints the scores of both halves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record the runs first")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="only runs whose names begin so")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between recorded runs")
    parser.add_argument("--shared", action="store_true", help="leave the cores to other processes as well")
    parser.add_argument("--gallery", type=Path, help="folder for report pages that differ in kind")
    given = parser.parse_args()
    names = tuple(given.only)
    traces = [trace for trace in all_traces() if trace.name.startswith(names)]
    whole = [one for one in WHOLE_RUNS if one.name.startswith(names)]
    if given.record:
        from benchmarks.health_exam.record import record
        from benchmarks.health_exam.whole_runs import record as record_whole

        FOLDER.mkdir(exist_ok=True)

        def say(text: str) -> None:
            print(text, flush=True)

        record(traces, FOLDER, pause_s=given.pause, is_first=not given.shared, say=say)
        record_whole(whole, say)
    results = [replay(trace) for trace in traces]
    if given.gallery is not None:
        from benchmarks.health_exam.gallery import SHOWN, write

        for path in write([result for result in results if result.trace.name in SHOWN], whole, given.gallery):
            print(path)
        return
    for half, title in ((0, "the first runs"), (1, "the second runs")):
        describe(title, [result for result in results if result.trace.half == half])


if __name__ == "__main__":
    main()
