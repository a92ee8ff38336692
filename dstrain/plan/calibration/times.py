"""Fits rates (products, attention, memory bandwidth, links, copies) to the step times of runs that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dstrain.facts.cluster.calibration import LINK_RATES, Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.plan.calibration.least_squares import Solution, solve
from dstrain.plan.calibration.observed import TEN_PERCENT_TAILS, Constant, Observed
from dstrain.plan.speed.efficiency import efficiency
from dstrain.plan.speed.step_time import PRIOR_UNCERTAINTY, speed

WIDTHS: Mapping[str, float] = MappingProxyType(
    {name: ratio for ratio, name in PRIOR_UNCERTAINTY.values() if name}
    | {"overlap_slowdown_ratio": 0.5, "nvme_write_bytes_per_s": 0.6}
)
"""Field of `Measured` → how far its prior may be off, over itself. Source: `PRIOR_UNCERTAINTY`; the two others are a
judgement."""

FORM_ERROR = 0.02
"""How far a step time is off if all constants are right, over itself: the form of the model, and noise of a run that
its windows do not show. A judgement; residuals that are larger widen the intervals."""

TELLING = 0.98
"""A constant changes if the runs narrow its prior range to this share or less. With less, the others absorb what it is
off by: at 0.6, 87 % of 60 plans of `benchmarks/calibrate.py` are within 5 %, in place of 92 % if all of them change."""

UNSEEN = 1e-3
"""Change of a step's logarithm, over the range of a constant, below which a run does not depend on it."""

KINKED = "launch_s"
"""The constant that shows only from where the GPU waits for the CPU: the fit starts on both sides of that."""


def rates_in_use(cluster: Cluster, measured: Measured) -> dict[str, float]:
    """Returns the constants by which plans for a cluster compute times: measured ones, else priors."""
    rates = efficiency(cluster, measured)
    return {
        "gemm_ratio": rates.gemm_ratio,
        "attention_ratio": rates.attention_ratio,
        "hbm_ratio": rates.hbm_bytes_per_s / cluster.gpu.hbm_bytes_per_s,
        "launch_s": rates.launch_s,
        "intra_bus_bytes_per_s": rates.intra_bus_bytes_per_s,
        "inter_bus_bytes_per_s": rates.inter_bus_bytes_per_s * cluster.gpus_per_node,
        "overlap_slowdown_ratio": rates.overlap_slowdown,
        "pcie_bytes_per_s": rates.pcie_bytes_per_s,
        "cpu_adam_bytes_per_s": rates.cpu_adam_bytes_per_s,
        "nvme_read_bytes_per_s": rates.nvme_read_bytes_per_s,
        "nvme_write_bytes_per_s": rates.nvme_write_bytes_per_s,
    }


def fit_times(runs: Sequence[Observed]) -> list[Constant]:
    """Returns the constants of the runs' step times, which have one kind of GPU; none without a step time.

    Minimizes the squares of log(measured / planned) and of the distances from the present values, each
    over its error. A constant whose range the runs do not narrow stays as it is and the others are fitted again, the
    least known one first.
    """
    timed = [run for run in runs if run.step_s is not None]
    if not timed:
        return []
    reference = max((run.workload for run in timed), key=lambda workload: workload.cluster.num_gpus)
    old = rates_in_use(reference.cluster, reference.measured)
    kept = _of_no_use(timed, old)
    usable = [name for name in old if name not in kept]
    full = _solution(timed, old, usable)
    while True:
        free = [name for name in old if name not in kept]
        solution = _solution(timed, old, free)
        widths = [prior_width(timed[0].workload.measured, name) for name in free]
        shares = [solution.error(index) / width for index, width in enumerate(widths)]
        worst = max(range(len(free)), key=lambda index: shares[index], default=None)
        if worst is None or shares[worst] <= TELLING:
            break
        kept[free[worst]] = _why(solution, free, worst)
    fitted = {}
    for name, change in zip(free, solution.values, strict=True):
        index = usable.index(name)
        error = math.hypot(full.error(index), full.values[index] - change)  # the constants that stay may be off too
        new = bounded(name, old[name] * math.exp(change))
        fitted[name] = Constant(
            name=name,
            old=old[name],
            new=new,
            error_ratio=TEN_PERCENT_TAILS * error,
            is_uncertain=error > WIDTHS[name] / 2,
        )
    return [fitted.get(name) or Constant(name=name, old=old[name], new=None, kept=kept[name]) for name in old]


def _of_no_use(runs: Sequence[Observed], old: Mapping[str, float]) -> dict[str, str]:
    """Returns the constants that cannot be fitted to these runs, and why."""
    kept: dict[str, str] = {}
    clusters = [run.workload.cluster for run in runs if run.workload.cluster.num_gpus > 1]
    for link, name in LINK_RATES.items():
        if any(getattr(cluster, f"{link}_origin") is Origin.MEASURED for cluster in clusters):
            kept[name] = "measured by dstrain doctor --network"
        elif len({_link_key(cluster, link) for cluster in clusters}) > 1:
            kept[name] = "the runs have different links"
    for name in old:
        if name not in kept and not any(_depends(run, name, old) for run in runs):
            kept[name] = "no run depends on it"
    return kept


def _link_key(cluster: Cluster, link: str) -> object:
    """Returns the key that clusters share if one constant stands for their links: between nodes, all GPUs share it."""
    if link == "intra_link":
        return cluster.intra_link
    return cluster.inter_link, cluster.gpus_per_node if cluster.num_nodes > 1 else None


def _depends(run: Observed, name: str, old: Mapping[str, float]) -> bool:
    """Returns whether a run's step time changes with a constant, anywhere in its range."""
    width = prior_width(run.workload.measured, name)
    times = [planned_s(run, {name: bounded(name, old[name] * math.exp(sign * width))}) for sign in (-1, 0, 1)]
    return math.log(max(times) / min(times)) > UNSEEN


def _solution(runs: Sequence[Observed], old: Mapping[str, float], free: Sequence[str]) -> Solution:
    """Returns the logarithms of what the free constants change by."""

    def residuals(values: Sequence[float]) -> list[float]:
        new = {
            name: bounded(name, old[name] * math.exp(max(-3.0, min(3.0, value))))
            for name, value in zip(free, values, strict=True)
        }
        return [math.log((run.step_s or 0.0) / planned_s(run, new)) for run in runs]

    errors = [math.hypot(FORM_ERROR, run.error_ratio) for run in runs]
    priors = [(0.0, prior_width(runs[0].workload.measured, name)) for name in free]
    signs = (0, -1, 1) if KINKED in free else (0,)
    starts = [[sign * WIDTHS[name] * (name == KINKED) for name in free] for sign in signs]
    return min((solve(residuals, errors, priors, start=start) for start in starts), key=lambda found: found.cost)


def prior_width(measured: Measured, name: str) -> float:
    """Returns how far a constant may be off before the fit: one that was measured, half as much."""
    return WIDTHS[name] * (1.0 if getattr(measured, name) is None else 0.5)


def planned_s(run: Observed, constants: Mapping[str, float]) -> float:
    """Returns the planned seconds of a run's step with other constants. The GPU's speed has to be known."""
    new: dict[str, Any] = {**constants}
    measured = replace(run.workload.measured, **new)
    calibration = Calibration(gpus={run.workload.cluster.gpu.name: measured})
    known = speed(replace(run.workload, calibration=calibration), run.configuration)
    assert known is not None, "a GPU of unknown speed"
    return known.step_s


def _why(solution: Solution, free: Sequence[str], index: int) -> str:
    """Returns why the runs do not tell a constant."""
    others = [other for other in range(len(free)) if other != index]
    near = max(others, key=lambda other: abs(solution.correlation(index, other)), default=None)
    if near is not None and abs(solution.correlation(index, near)) > 0.5:
        return f"the runs do not tell it apart from {free[near]}"
    return "too small a part of the steps"


_HIGHEST: Mapping[str, float] = MappingProxyType(
    {name: 1.0 if name.endswith("_ratio") else math.inf for name in WIDTHS}
)
"""Field of `Measured` → its highest legal value."""


def bounded(name: str, value: float) -> float:
    return min(value, _HIGHEST[name])
