"""Fits a calibration to runs with one kind of GPU, and compares plans of the same runs before and after.

Of memory it fits context, NCCL's buffers and the allocator's reserve; of time the rates of products, attention, memory
bandwidth, links and copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from dstrain.facts.cluster.calibration import LINK_RATES, Calibration, Measured
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.memory import memory
from dstrain.plan.memory.outside import context_bytes, outside_bytes
from dstrain.plan.speed.efficiency import efficiency
from dstrain.plan.speed.step_time import PRIOR_UNCERTAINTY, speed

TEN_PERCENT_TAILS = 1.645
"""Standard deviations on either side that hold 90 % of a normal distribution."""
SIZE_ERROR = 0.01
"""How far a measured size is off what it stands for, over itself: other processes, rounding of the driver. A judgement;
a larger scatter of the runs replaces it."""
CLEARLY = 0.9
"""One ratio for all runs replaces the replayed allocator only if its error is this share of that one's, or less."""
WIDTHS: Mapping[str, float] = MappingProxyType(
    {name: ratio for ratio, name in PRIOR_UNCERTAINTY.values() if name}
    | {"overlap_slowdown_ratio": 0.5, "nvme_write_bytes_per_s": 0.6}
)
"""Field of `Measured` → how far its prior may be off, over itself. Source: `PRIOR_UNCERTAINTY`; the two others are a
judgement."""
TIME_ERROR = 0.02
"""How far a step time is off if all constants are right, over itself: the form of the model, and noise of a run that
its windows do not show. A judgement; residuals that are larger widen the intervals."""
TELLING = 0.98
"""A constant changes if the runs narrow its prior range to this share or less. With less, the others absorb what it is
off by: at 0.6, 87 % of 60 plans of `benchmarks/calibrate.py` are within 5 %, in place of 92 % if all of them change."""
UNSEEN = 1e-3
"""Change of a step's logarithm, over the range of a constant, below which a run does not depend on it."""
KINKED = "launch_s"
"""The constant that shows only from where the GPU waits for the CPU: the fit starts on both sides of that."""
_DIFFERENCE = 1e-3
"""Step of a numerical derivative."""
_ITERATIONS = 12
_TOLERANCE = 1e-6

_NO_RATIO_OF_ONE = "one configuration does not tell it: a run of another one would"
_TOGETHER = "every run has several ranks, where context and NCCL are measured together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run, as far as it counts; None for what it did not measure, or what must not be fitted."""

    name: str
    """Name in messages."""
    workload: Workload
    """Model and machines, with the present calibration."""
    configuration: Configuration
    """The configuration that ran."""
    step_s: float | None = None
    """Seconds of a step."""
    error_ratio: float = 0.0
    """Standard error of these, over them."""
    reserved_bytes: int | None = None
    """Peak of the allocator's memory on the fullest rank."""
    outside_bytes: int | None = None
    """GPU memory outside of PyTorch, the median of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant of the planner, before and after."""

    name: str
    """The field of `Measured`."""
    old: float
    """Value in use: a prior, or an earlier calibration."""
    new: float | None
    """Fitted value; None if it stays."""
    error_ratio: float | None = None
    """Half the width of the range that the true value is in for 9 of 10 runs, over `new`."""
    is_uncertain: bool = False
    """Whether the runs narrow its range by less than half."""
    kept: str | None = None
    """Why it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Planned figures of a run."""

    run: Observed
    before: Estimate
    """The plan with the present calibration."""
    after: Estimate
    """The next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants of one kind of GPU, as runs measured them."""

    gpu: str
    """Its name in the table of GPUs."""
    constants: tuple[Constant, ...]
    """Those that a run depends on; the others are not mentioned."""
    source: str | None
    """Their origin, in words."""
    links: Mapping[str, str]
    """The links of the runs: fields of `Measured` → names."""

    def compared(self, run: Observed) -> Compared:
        """Returns the planned figures of a run, now and next."""
        after = assess(self.applied_to(run.workload), run.configuration)
        return Compared(run=run, before=assess(run.workload, run.configuration), after=after)

    @property
    def changed(self) -> tuple[Constant, ...]:
        """The constants that change."""
        return tuple(constant for constant in self.constants if constant.new is not None)

    def applied(self, present: Measured) -> Measured:
        """Returns an entry of the calibration file with the new values; the same one if nothing changes."""
        if not self.changed:
            return present
        told = {item.name for item in self.changed}
        uncertain = {item.name for item in self.changed if item.is_uncertain} | ({*present.uncertain} - told)
        values: dict[str, Any] = {item.name: _typed(item) for item in self.changed}
        values |= {link: name for link, name in self.links.items() if LINK_RATES[link] in told}
        return replace(present, **values, source=self.source, uncertain=tuple(sorted(uncertain)))

    def applied_to(self, workload: Workload) -> Workload:
        """Returns a workload of the same GPU with the next calibration."""
        gpus = {**workload.calibration.gpus, self.gpu: self.applied(workload.measured)}
        return replace(workload, calibration=replace(workload.calibration, gpus=gpus))


def fit(runs: Sequence[Observed], *, source: str | None = None) -> Fit:
    """Fits the constants to the runs; at least one, all with the same GPU. `source` describes them in the file."""
    constants = (*_outside(runs), *_reserved(runs), *_rates(runs))
    largest = max((run.workload for run in runs), key=lambda workload: workload.cluster.num_gpus)
    return Fit(gpu=largest.cluster.gpu.name, constants=constants, source=source, links=largest.links)


def _typed(constant: Constant) -> float | int:
    """Returns the new value: bytes are whole."""
    assert constant.new is not None
    is_size = constant.name in ("context_bytes", "nccl_bytes")
    return round(constant.new) if is_size else float(f"{constant.new:.4g}")


def _outside(runs: Sequence[Observed]) -> list[Constant]:
    """Returns context and NCCL: the former from runs of one rank, the latter from what others have beyond it.

    Without a run of one rank the context stays, unless it alone is more than all that was measured.
    """
    measured = runs[0].workload.measured
    gpu = runs[0].workload.cluster.gpu
    old = context_bytes(gpu) if measured.context_bytes is None else measured.context_bytes
    alone = [run.outside_bytes for run in runs if run.outside_bytes and run.workload.cluster.num_gpus == 1]
    joined = [run for run in runs if run.outside_bytes and run.workload.cluster.num_gpus > 1]
    constants = []
    context = old
    if alone:
        context = round(fmean(alone))
        constants.append(_constant("context_bytes", old, context, alone))
    if not joined:
        return constants
    totals = [run.outside_bytes or 0 for run in joined]
    # several ranks measure the sum of both: it bounds the context, and does not tell it
    if not alone and min(totals) < old:
        context = min(totals)
        constants.append(_constant("context_bytes", old, context, totals))
    elif not alone:
        constants.append(Constant(name="context_bytes", old=old, new=None, kept=_TOGETHER))
    rules = [outside_bytes(run.workload.cluster, run.configuration, measured) - old for run in joined]
    rests = [total - context for total in totals]
    return [*constants, _nccl(rules, rests, totals)]


def _nccl(rules: Sequence[int], rests: Sequence[int], totals: Sequence[int]) -> Constant:
    """Returns NCCL's bytes; `rules` are what plans use now, `rests` what was measured."""
    new = max(0, round(fmean(rests)))
    by_rule = _rms([rest - rule for rest, rule in zip(rests, rules, strict=True)])
    by_mean = _rms([rest - new for rest in rests])
    if by_mean > CLEARLY * by_rule:
        kept = "what plans use is as close for runs of several communicators" if by_mean else "already that"
        return Constant(name="nccl_bytes", old=fmean(rules), new=None, kept=kept)
    return _constant("nccl_bytes", fmean(rules), new, totals)


def _constant(name: str, old: float, new: int, values: Sequence[int]) -> Constant:
    """Returns a size with its error, from the errors of the values that sum to it."""
    middle = fmean(values)
    error = max(SIZE_ERROR * middle, _rms([value - middle for value in values])) / math.sqrt(len(values))
    return Constant(name=name, old=old, new=new, error_ratio=TEN_PERCENT_TAILS * error / max(1, new))


def _reserved(runs: Sequence[Observed]) -> list[Constant]:
    """Returns the ratio of reserved to predicted live bytes, the geometric mean of the runs' ones.

    A ratio stands for all configurations, where plans replay the allocator for each: it replaces that only if it is
    clearly closer to what was measured.
    """
    sized = [(run, memory(run.workload, run.configuration)) for run in runs if run.reserved_bytes]
    if not sized:
        return []
    ratios = [math.log((run.reserved_bytes or 0) / needs.live_bytes_per_gpu) for run, needs in sized]
    planned = [math.log((run.reserved_bytes or 0) / needs.reserved_bytes_per_gpu) for run, needs in sized]
    old = fmean(needs.reserved_bytes_per_gpu / needs.live_bytes_per_gpu for _, needs in sized)
    kept = None
    new = max(0.0, fmean(ratios))
    apart = _rms([ratio - new for ratio in ratios])
    if len({run.configuration for run, _ in sized}) < 2:
        kept = _NO_RATIO_OF_ONE
    elif apart > CLEARLY * _rms(planned):
        kept = "what plans use is as close"
    if kept is not None:
        return [Constant(name="reserved_ratio", old=old, new=None, kept=kept)]
    error = max(SIZE_ERROR, apart) / math.sqrt(len(sized))
    return [Constant(name="reserved_ratio", old=old, new=math.exp(new), error_ratio=TEN_PERCENT_TAILS * error)]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


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


def _rates(runs: Sequence[Observed]) -> list[Constant]:
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

    errors = [math.hypot(TIME_ERROR, run.error_ratio) for run in runs]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The most probable values of the unknowns, and how far they may be off."""

    values: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    """Of the values; if residuals are larger than their errors explain, larger by as much."""
    cost: float
    """The minimum."""

    def error(self, index: int) -> float:
        """Returns the standard deviation of a value."""
        return math.sqrt(self.covariance[index][index])

    def correlation(self, one: int, other: int) -> float:
        """Returns the correlation of two values, -1…1."""
        return self.covariance[one][other] / (self.error(one) * self.error(other))


def solve(
    residuals: Callable[[Sequence[float]], Sequence[float]],
    errors: Sequence[float],
    priors: Sequence[tuple[float, float]],
    *,
    start: Sequence[float] | None = None,
) -> Solution:
    """Returns the values that minimize residuals², over errors², plus the distance² from the priors, over theirs.

    `residuals` of values: measured − predicted; `errors`: their standard deviations; `priors`: (guess, deviation) of
    each value. Gauss–Newton steps from `start`, by default the guesses, halved while they make it worse.

    >>> one = solve(lambda x: [2.0 - x[0]], [0.01], [(0.0, 10.0)])
    >>> round(one.values[0], 3), round(one.error(0), 3)
    (2.0, 0.01)
    """
    import numpy as np  # here: plans need none of it

    guesses, widths = np.reshape(priors, (-1, 2)).astype(float).T

    def misses(values: Any) -> Any:
        # a prior is one more measurement, of the value itself: both count over their deviations
        return np.concatenate([np.array(residuals(values.tolist())) / errors, (guesses - values) / widths])

    values = guesses if start is None else np.array(start, dtype=float)
    now = misses(values)
    for _ in range(_ITERATIONS):
        step = np.linalg.lstsq(_slopes(misses, values, now), now)[0] if len(values) else values
        ends = (values + step / 2**halvings for halvings in range(8))
        better = next((end for end in ends if (there := misses(end)) @ there <= now @ now), None)
        if better is None:  # at a kink
            break
        change = max(abs(better - values), default=0.0)
        values, now = better, misses(better)
        if change < _TOLERANCE:
            break
    at = _slopes(misses, values, now)
    scale = max(1.0, (now[: len(errors)] ** 2).sum() / max(1, len(errors)))
    covariance = scale * np.linalg.inv(at.T @ at)
    return Solution(values=tuple(values.tolist()), covariance=tuple(map(tuple, covariance.tolist())), cost=now @ now)


def _slopes(misses: Callable[[Any], Any], values: Any, now: Any) -> Any:
    """Returns the derivatives of the predictions: (misses, values)."""
    import numpy as np

    steps = _DIFFERENCE * np.eye(len(values))
    return np.array([now - misses(values + step) for step in steps]).reshape(len(values), len(now)).T / _DIFFERENCE
