"""Fits a calibration to runs with one kind of GPU, and says what plans of the same runs say before and after.

Of memory it fits context, NCCL's buffers and the allocator's reserve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from dstrain.facts.cluster.calibration import LINK_RATES, Measured
from dstrain.facts.workload import Workload
from dstrain.plan.calibration.observed import TEN_PERCENT_TAILS, Constant, Observed
from dstrain.plan.calibration.times import fit_times
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.memory import memory
from dstrain.plan.memory.outside import context_bytes, outside_bytes

FORM_ERROR = 0.01
"""How far a measured size is off what it stands for, over itself: other processes, rounding of the driver. A judgement;
a larger scatter of the runs replaces it."""
CLEARLY = 0.9
"""One ratio for all runs replaces the replayed allocator only if its error is this share of that one's, or less."""

_NO_RATIO_OF_ONE = "one configuration does not tell it: a run of another one would"
_TOGETHER = "every run has several ranks, where context and NCCL are measured together"


def fit_sizes(runs: Sequence[Observed]) -> list[Constant]:
    """Returns the constants of the runs' memory, which have one kind of GPU; none for what no run measured."""
    return [*_outside(runs), *_reserved(runs)]


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
    error = max(FORM_ERROR * middle, _rms([value - middle for value in values])) / math.sqrt(len(values))
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
    error = max(FORM_ERROR, apart) / math.sqrt(len(sized))
    return [Constant(name="reserved_ratio", old=old, new=math.exp(new), error_ratio=TEN_PERCENT_TAILS * error)]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


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
    constants = (*fit_sizes(runs), *fit_times(runs))
    largest = max((run.workload for run in runs), key=lambda workload: workload.cluster.num_gpus)
    return Fit(gpu=largest.cluster.gpu.name, constants=constants, source=source, links=largest.links)


def _typed(constant: Constant) -> float | int:
    """Returns the new value: bytes are whole."""
    assert constant.new is not None
    is_size = constant.name in ("context_bytes", "nccl_bytes")
    return round(constant.new) if is_size else float(f"{constant.new:.4g}")
