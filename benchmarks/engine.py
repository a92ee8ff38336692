"""Live bytes of DeepSpeed's own engine on CPU ranks against the plan's, configuration by configuration.

Example: python benchmarks/engine.py --json benchmarks/results/engine-cpu.json

Real models, collectives and optimizers; takes some minutes. What CPU kernels save is what GPU kernels save,
except for dropout's mask; workspaces of GPU kernels are left out of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.train.engine import Engine
from tests.train.engine_cases import CASES, Case, Measured, predicted, run

MIB = 2**20


def measure(engine: Engine, ranks: int, folder: Path) -> list[tuple[Case, Measured]]:
    """Returns the measured cases of that many ranks."""
    cases = [case for case in CASES if case.ranks == ranks]
    return list(zip(cases, run(engine, cases, folder / str(ranks), timeout_s=1800), strict=True))


def compared(case: Case, real: Measured) -> dict[str, Any]:
    """Returns one line of the results; errors are the plan's over the measurement, less one."""
    plan = predicted(case)
    phases = {name: plan.phases[name] / count - 1 for name, count in real.phases.items() if name in plan.phases}
    if case.configuration.zero.offload.value != "none":
        phases.pop("step", None)  # the host's
    worst = max(phases, key=lambda name: abs(phases[name]))
    return {
        "name": case.name,
        "ranks": case.ranks,
        "peak_bytes": real.peak,
        "planned_peak_bytes": plan.peak,
        "peak_error_ratio": plan.peak / real.peak - 1,
        "peak_instant": max(real.phases, key=lambda name: real.phases[name]),
        "steady_bytes": real.steady,
        "steady_error_ratio": plan.steady / real.steady - 1,
        "worst_phase": worst,
        "worst_phase_error_ratio": phases[worst],
        "host_bytes": real.host,
        "host_error_ratio": plan.host / real.host - 1 if plan.host else 0.0,
    }


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to FILE")
    target = parser.parse_args().json
    with tempfile.TemporaryDirectory() as name, Engine(Path(name)) as engine:
        lines = [compared(*pair) for ranks in (2, 4) for pair in measure(engine, ranks, Path(name))]
    print(f"{'':56}{'ranks':>5}{'peak MiB':>10}{'plan':>10}{'error':>9}  {'at':20}{'worst phase':>12}")
    for line in lines:
        peak, plan = line["peak_bytes"] / MIB, line["planned_peak_bytes"] / MIB
        print(
            f"{line['name']:56}{line['ranks']:5}{peak:10.2f}{plan:10.2f}{line['peak_error_ratio']:+9.2%}  "
            f"{line['peak_instant']:20}{line['worst_phase_error_ratio']:+12.2%}"
        )
    errors = [abs(line["peak_error_ratio"]) for line in lines]
    print(f"peak: mean error {sum(errors) / len(errors):.3%}, worst {max(errors):.2%}, {len(lines)} configurations")
    if target:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count()}
        packages = {name: version(name) for name in ("torch", "deepspeed", "transformers", "peft")}
        target.write_text(json.dumps({**machine, **packages, "measured": lines}, indent=2) + "\n", encoding="utf-8")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
