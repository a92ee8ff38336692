"""What monitoring costs a step of the demo: `dstrain run` side by side, with all of it, with parts, and without.

Example: python benchmarks/overhead.py --json benchmarks/results/overhead-2-cores.json

Every variant is a run of its own by DeepSpeed's launcher, on two CPU ranks with a core each, with the demo's model,
data and batch. All start together and then take turns, round by round, each time another one first, so that other load
slows all of them equally; in their turn ranks ask for more of the cores than other processes (nice), which root gets.
A round is a logging window: ten steps with one log. `ratio` is that of the median steps, that of a round is to the run
without monitoring in the same round, the median with its quartiles; CPU seconds are those of all threads of both ranks.
`counted` has all monitoring, and counts the CPU seconds that its functions take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from benchmarks.peer_tools import Run, Tool, by_dstrain, make_case, versions
from benchmarks.peers import make_inputs

SIZES = {
    "rounds": 12, "steps": 10, "warmup": 10, "seq_len": 256, "micro_batch": 8, "grad_accum": 1, "samples": 10**6,
    "hidden_size": 128, "layers": 4, "experts": 0,
}  # fmt: skip
"""Those of `dstrain demo`."""
ON, COUNTED, OFF = "all", "counted", "off"
_NICE = -10
VARIANTS: Mapping[str, Mapping[str, str]] = {
    ON: {"monitor.sinks": "[swanlab]", "monitor.mode": "offline"},
    COUNTED: {"monitor.sinks": "[swanlab]", "monitor.mode": "offline"},
    "no-sinks": {},
    "no-collectives": {"monitor.collectives": "false"},
    OFF: {"monitor.collectives": "false"},
}
"""Variant → keys of the job. Without monitoring, no metric is measured, gathered or written, and no rule is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round of one variant."""

    variant: str
    number: int
    """Of the round, from 0."""
    step_s: float
    """Seconds of a step, of the slower rank."""
    cpu_s: float
    """CPU seconds of a step, of both ranks."""
    monitor_cpu_s: float
    """Those of them that monitoring takes, where they are counted; else 0."""


def rounds(runs: Mapping[str, Run], sizes: Mapping[str, int]) -> Iterator[Measured]:
    """Yields each round of the variants; in the next round another one is the first."""
    names = list(runs)
    try:
        for number in range(sizes["rounds"]):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                ranks = runs[name].round(number)
                step_s = max(rank["wall_s"] for rank in ranks) / sizes["steps"]
                cpu_s = sum(rank["cpu_s"] for rank in ranks) / sizes["steps"]
                monitor_cpu_s = sum(rank["monitor_cpu_s"] for rank in ranks) / sizes["steps"]
                yield Measured(variant=name, number=number, step_s=step_s, cpu_s=cpu_s, monitor_cpu_s=monitor_cpu_s)
    finally:
        for run in runs.values():
            run.stop()


def ratios(results: Sequence[Measured], variant: str, figure: str) -> list[float]:
    """Returns a variant's figure over that without monitoring, of each round, in order of size."""
    bases = {one.number: getattr(one, figure) for one in results if one.variant == OFF}
    mine = [one for one in results if one.variant == variant and one.number in bases]
    return sorted(getattr(one, figure) / bases[one.number] for one in mine)


def table(results: Sequence[Measured]) -> str:
    """Returns a row for each variant: the median step, and its ratios with their quartiles."""
    rows = ["| monitoring | median step | ratio | ratio of a round | CPU seconds, ratio of a round |"]
    rows += ["|---|---:|---:|---:|---:|"]
    medians = {
        name: median(one.step_s for one in results if one.variant == name) for name in {one.variant for one in results}
    }
    for name in sorted(medians):
        cells = [f"{1000 * medians[name]:.0f} ms", f"{medians[name] / medians[OFF]:.3f}"]
        cells += [ratio_text(ratios(results, name, figure)) for figure in ("step_s", "cpu_s")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    counted = [one.monitor_cpu_s / one.cpu_s for one in results if one.variant == COUNTED]
    if counted:
        rows += ["", f"counted: {median(counted):.2%} of the CPU seconds ({min(counted):.2%} to {max(counted):.2%})"]
    return "\n".join(rows)


def ratio_text(values: Sequence[float]) -> str:
    """Returns the median of ratios and their quartiles.

    >>> ratio_text([1.0, 1.002, 1.004, 1.006, 1.05])
    '1.004 (1.001 to 1.028)'
    """
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS))
    parser.add_argument("--rounds", type=int, default=SIZES["rounds"], help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to FILE")
    given = parser.parse_args()
    sizes = {**SIZES, "rounds": given.rounds}
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder, sizes)
        case = make_case(folder, zero_stage=2, precision="fp32", sizes=sizes)
        settings = {**inputs, **{name: sizes[name] for name in ("rounds", "steps", "warmup")}}
        runs = {}
        for variant in dict.fromkeys((*given.variants, OFF)):
            keys: dict[str, Any] = {"output_dir": f"output-{variant}", **VARIANTS[variant]}
            tool = Tool(name=variant, packages=(), command=partial(by_dstrain, **keys), attention="")
            how = {OFF: "off", COUNTED: "timed"}.get(variant, "on")
            runs[variant] = Run(tool, case, sys.executable, {**settings, "monitoring": how, "nice": _NICE})
        for one in rounds(runs, sizes):
            results.append(one)
            print(f"{one.variant}, round {one.number}: {1000 * one.step_s:.1f} ms", file=sys.stderr)
    if given.json:
        tool = Tool(name="dstrain", packages=(), command=by_dstrain, attention="")
        made_with = {"sizes": sizes, "machine": platform.machine(), "cpus": os.cpu_count()}
        made_with |= {"versions": versions(tool, sys.executable)}
        report = {**made_with, "measured": [asdict(one) for one in results]}
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
