"""Measures about twenty configurations on this machine's GPU in ten minutes, and compares each with the plan for it.

Example: python benchmarks/measure.py
         python benchmarks/measure.py --quick --only lora

Each configuration trains a few steps in a process of its own (`measured_run.py`): DeepSpeed's real engine with one
rank, Qwen3's shapes with random weights, rows without padding. Compared are live bytes (torch's max_memory_allocated
after the first step), reserved bytes, what NVML shows beyond the idle GPU, and the median step time. Without a GPU tiny
models train on the CPU, where live bytes are counted from tensor storages and there is nothing to reserve.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file

from benchmarks.measured_cases import CPU_CASES, GPU_CASES, NUM_QUICK, SHAPES, Case
from benchmarks.measured_child import Child
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.model import families
from dstrain.facts.workload import Workload
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.units import format_bytes

HERE = Path(__file__).resolve().parent
CASE_TIMEOUT_S = 240
QUANTITIES = ("live_bytes", "reserved_bytes", "device_bytes", "step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Planned and measured quantities of one case."""

    name: str
    """Short description of the case."""
    outcome: str
    """`ok`, `out of memory`, `failed`, or `left out`."""
    fits: bool
    """Whether the plan says that it fits."""
    planned: dict[str, float | None]
    """Planned values by quantity; None if the plan has no value."""
    measured: dict[str, float]
    """Measured values by quantity, and further values that the run reports."""
    told: str = ""
    """Why it failed or was left out."""
    versions: dict[str, str]
    """Versions of the packages that ran."""

    def error(self, quantity: str) -> float | None:
        """Returns planned / measured − 1; None if either is missing or the run failed."""
        planned, measured = self.planned.get(quantity), self.measured.get(quantity)
        if self.outcome != "ok" or planned is None or not measured:
            return None
        return planned / measured - 1


def machine_cluster() -> Cluster:
    """Returns one GPU of this machine as a cluster, or one CPU rank."""
    local = probe.local_gpus()
    gpu = gpus.from_nvml(local[0].name, local[0].memory_mib) if local else gpus.gpu("cpu")
    return clusters.describe(
        gpu=gpu,
        gpu_origin=Origin.MEASURED,
        gpus=1,
        host_memory_bytes=probe.host_memory_bytes(),
        host_memory_origin=Origin.MEASURED,
    )


def plan_of(case: Case, cluster: Cluster) -> Estimate:
    """Returns the plan's estimate of a case."""
    model = families.from_config(SHAPES[case.shape], name=case.shape, source=case.shape)
    return assess(Workload(model=model, cluster=cluster), case.configuration())


def planned(estimate: Estimate) -> dict[str, float | None]:
    """Returns the planned values by quantity."""
    needs = estimate.memory
    return {
        "live_bytes": needs.live_bytes_per_gpu,
        "reserved_bytes": needs.reserved_bytes_per_gpu,
        "device_bytes": needs.device_bytes_per_gpu,
        "step_s": estimate.speed.step_s if estimate.speed else None,
    }


def reason_to_leave_out(case: Case, estimate: Estimate, cluster: Cluster) -> str:
    """Returns why a case cannot run here, or an empty text; a case that barely exceeds the GPU still runs."""
    if case.liger and find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if estimate.memory.device_bytes_per_gpu > 1.1 * cluster.gpu.memory_bytes:
        return f"needs {format_bytes(estimate.memory.device_bytes_per_gpu)}, far more than the GPU has"
    if estimate.memory.host_bytes_per_node > cluster.host_memory_bytes:
        return f"needs {format_bytes(estimate.memory.host_bytes_per_node)} of host RAM"
    return ""


def measure(cases: list[Case], cluster: Cluster, minutes: float) -> Iterator[Result]:
    """Yields a result for every case, in order; cases beyond the time limit are left out.

    While a case runs on a GPU, the next one imports its packages, which takes as long as a case.
    """
    on_gpu = cluster.gpu.name != "cpu"
    deadline = time.monotonic() + 60 * minutes
    estimates = [(case, plan_of(case, cluster)) for case in cases]
    reasons = [reason_to_leave_out(case, estimate, cluster) for case, estimate in estimates]
    with tempfile.TemporaryDirectory() as name:
        waiting: dict[int, Child] = {}

        def begin(index: int) -> Child:
            return waiting.pop(index, None) or Child(cases[index], Path(name), on_gpu=on_gpu)

        try:
            for index, ((case, estimate), reason) in enumerate(zip(estimates, reasons, strict=True)):
                left_s = deadline - time.monotonic()
                told = reason or ("" if left_s > 0 else "no time left")
                answer: dict[str, Any] = {"outcome": "left out", "error": told}
                if not told:
                    child = begin(index)
                    following = next((later for later in range(index + 1, len(cases)) if not reasons[later]), None)
                    if on_gpu and following is not None:
                        waiting[following] = begin(following)
                    answer = child.measure(min(CASE_TIMEOUT_S, left_s + 60))
                yield result_of(case, estimate, answer)
        finally:
            for child in waiting.values():
                child.close()


def result_of(case: Case, estimate: Estimate, answer: dict[str, Any]) -> Result:
    """Returns the result of a case from its child's answer."""
    return Result(
        name=case.name,
        outcome=answer.pop("outcome"),
        told=answer.pop("error", ""),
        versions=answer.pop("versions", {}),
        fits=estimate.fits,
        planned=planned(estimate),
        measured=answer,
    )


def short(quantity: str) -> str:
    """Returns a quantity without its unit."""
    return quantity.partition("_")[0]


def cells(result: Result, quantity: str) -> str:
    """Returns planned, measured and error of a quantity."""
    show = (lambda value: f"{value:.3f} s") if quantity == "step_s" else format_bytes
    values = [result.planned.get(quantity), result.measured.get(quantity)]
    error = result.error(quantity)
    texts = [*("–" if value is None else show(value) for value in values), "" if error is None else f"{error:+.1%}"]
    return f"{texts[0]:>10}{texts[1]:>10}{texts[2]:>8}"


def tell(results: list[Result], quantities: list[str]) -> None:
    """Prints mean and worst error of each quantity, and how often the plan was right about fitting."""
    for quantity in quantities:
        errors = [error for result in results if (error := result.error(quantity)) is not None]
        if errors:
            mean, bias, worst = statistics.mean(map(abs, errors)), statistics.mean(errors), max(errors, key=abs)
            counted = f"mean error {mean:.2%}, bias {bias:+.2%}, worst {worst:+.2%} of {len(errors)}"
            print(f"{short(quantity)}: {counted}")
    ran = [result for result in results if result.outcome in ("ok", "out of memory")]
    right = sum(result.fits == (result.outcome == "ok") for result in ran)
    print(f"fits or not: {right} of {len(ran)} right; {len(results) - len(ran)} not measured")


def main() -> None:
    """Measures, prints the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"the first {NUM_QUICK} configurations only")
    parser.add_argument(
        "--only", metavar="TEXT", action="append", help="configurations whose name contains TEXT; may be repeated"
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="start no configuration after this time (default: 10)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="default: benchmarks/results, unless --quick or --only"
    )
    options = parser.parse_args()
    cluster = machine_cluster()
    on_gpu = cluster.gpu.name != "cpu"
    machine = cluster.gpu.name if on_gpu else f"cpu-{os.cpu_count()}-cores"
    if not on_gpu:
        print("no GPU found: tiny models on the CPU, live bytes counted from tensor storages", file=sys.stderr)
    texts = options.only or [""]
    wanted = [case for case in (GPU_CASES if on_gpu else CPU_CASES) if any(text in case.name for text in texts)]
    cases = wanted[:NUM_QUICK] if options.quick else wanted
    quantities = list(QUANTITIES) if on_gpu else ["live_bytes", "step_s"]
    width = max((len(case.name) for case in cases), default=0)
    print(f"{'planned, measured, error':{width}}" + "".join(f"{short(quantity):^28}" for quantity in quantities))
    results = []
    for result in measure(cases, cluster, options.minutes):
        results.append(result)
        note = f"  {result.outcome}: {result.told}" if result.outcome != "ok" else ""
        print(f"{result.name:{width}}" + "".join(cells(result, quantity) for quantity in quantities) + note, flush=True)
    tell(results, quantities)
    whole = not (options.quick or options.only)
    target = options.json or (HERE / "results" / f"measure-{machine}.json" if whole else None)
    if target:
        facts = {"machine": machine, "cpus": os.cpu_count(), "python": platform.python_version()}
        target.write_text(json.dumps({**facts, "results": [asdict(result) for result in results]}, indent=2) + "\n")
        print(f"written to {target}", file=sys.stderr)
    if not any(result.outcome == "ok" for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
