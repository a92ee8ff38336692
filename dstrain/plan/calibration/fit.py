"""Fits a calibration to runs with one kind of GPU, and says what plans of the same runs say before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dstrain.facts.cluster.calibration import LINK_RATES, Measured
from dstrain.facts.workload import Workload
from dstrain.plan.calibration.observed import Constant, Observed
from dstrain.plan.calibration.sizes import fit_sizes
from dstrain.plan.calibration.times import fit_times
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Estimate


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
