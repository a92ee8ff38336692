"""Tape against trace: the plan's activation peaks, and those of Transformers' own code on tensors without data.

Example: python benchmarks/tape.py --shapes 3 --json tape.json

For every family and every way to train it, shapes are drawn at random from a fixed seed. An error is
tape / trace − 1, of the highest moment of a micro-batch's forward and backward pass beside the parameters, with
gradients of parameters and without what kernels allocate inside, which a trace does not see.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.plan.memory.layers.comparing import Compared, compare
from tests.plan.memory.layers.shapes import FAMILIES, cases


def rows(compared: Iterable[Compared], key: str) -> list[str]:
    """Returns a line for each value of a field: number of cases, mean and worst error, number out of tolerance."""
    groups: dict[str, list[Compared]] = {}
    for case in compared:
        groups.setdefault(getattr(case, key), []).append(case)
    lines = [f"{key:<48}{'cases':>6}{'mean':>10}{'worst':>10}{'outside':>9}"]
    for name, group in groups.items():
        errors = [case.error_ratio for case in group]
        mean = sum(map(abs, errors)) / len(errors)
        outside = sum(not case.is_within for case in group)
        lines.append(f"{name:<48}{len(group):>6}{mean:>10.4%}{max(errors, key=abs):>+10.4%}{outside:>9}")
    return lines


def main() -> None:
    """Prints tables by family and by way, and the worst cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=1, help="shapes of each family and way [%(default)s]")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this family; may be repeated")
    parser.add_argument("--worst", type=int, default=10, help="number of worst cases to show [%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case to FILE")
    options = parser.parse_args()
    families = tuple(options.family or FAMILIES)
    begun = time.monotonic()
    asked = list(cases(shapes=options.shapes, families=families))
    compared = compare(asked)
    unknown = sorted({case.family for case in asked} - {case.family for case in compared})
    print("\n".join(rows(compared, "family")), end="\n\n")
    print("\n".join(rows(compared, "way")), end="\n\n")
    for case in sorted(compared, key=lambda case: -abs(case.error_ratio))[: options.worst]:
        print(f"{case.error_ratio:+.4%}  {case.family}; {case.way}; {case.shape}")
        print(f"          trace {case.trace_bytes} {case.trace_instant}, tape {case.tape_bytes} {case.tape_instant}")
    print(f"\n{len(compared)} cases in {time.monotonic() - begun:.0f} s; unknown to the tape: {unknown or 'none'}")
    if options.json:
        records = [asdict(case) | {"error_ratio": case.error_ratio} for case in compared]
        options.json.write_text(json.dumps({"cases": records, "unknown": unknown}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
