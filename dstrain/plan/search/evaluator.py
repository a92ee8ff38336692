"""Memoised bounds, step times and estimates, one per candidate."""

from __future__ import annotations

from dataclasses import dataclass, field

from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import ASKED_GPU_RATIO, USABLE_GPU_RATIO, USABLE_HOST_RATIO, assess
from dstrain.plan.estimate_records import Estimate, Speed
from dstrain.plan.memory.memory import Detail
from dstrain.plan.request import Request
from dstrain.plan.search.bounds import Bound, bound, passes_s
from dstrain.plan.search.search_space import Candidate, data_parallel_ranks
from dstrain.plan.speed.efficiency import efficiency
from dstrain.plan.speed.step_time import difference_error_s, speed

QUICK_ERROR_RATIO = 0.10
"""The most by which quick estimates of live bytes exceed exact ones. The bytes that the allocator holds besides are
bounded from above, and count only once they are replayed. Source: tests/plan/memory/test_closed_form.py."""

Key = tuple[float, ...]
"""Sort key of candidates: seconds per sample or, if speed is unknown, the order of lost speed."""


@dataclass(slots=True)
class Evaluator:
    """Caches the bounds, times and estimates of the candidates of one search."""

    workload: Workload
    usable_ratio: float
    bounds: dict[int, Bound] = field(default_factory=dict)
    passes: dict[tuple[object, ...], float] = field(default_factory=dict)
    times: dict[Candidate, Key | None] = field(default_factory=dict)
    speeds: dict[Candidate, Speed] = field(default_factory=dict)
    estimates: dict[Candidate, Estimate] = field(default_factory=dict)
    exact: set[Candidate] = field(default_factory=set)

    def bound(self, candidate: Candidate) -> Bound:
        """Returns the bound of a candidate's way, computed once."""
        key = id(candidate.way)
        if key not in self.bounds:
            self.bounds[key] = bound(self.workload, candidate.way)
        return self.bounds[key]

    def least_time(self, candidate: Candidate) -> Key:
        """Returns a bound of `time`; the passes depend on few choices, and are computed once for each."""
        way, micro_batch = candidate.way, candidate.micro_batch
        key = (way.parallel, way.checkpointing, way.zero.stage == 3, micro_batch)
        if key not in self.passes:
            self.passes[key] = passes_s(self.workload, way, micro_batch)
        step_s = candidate.grad_accum * self.passes[key] + self.bound(candidate).step_s
        return (step_s / self.samples(candidate),)

    def time(self, candidate: Candidate) -> Key | None:
        """Returns the seconds of one sample of a step, by which plans of different batches compare; None if the GPU's
        speed is unknown."""
        if candidate not in self.times:
            known = speed(self.workload, candidate.configuration(self.workload.model))
            self.times[candidate] = None
            if known is not None:
                self.times[candidate] = (known.step_s / self.samples(candidate),)
                self.speeds[candidate] = known
        return self.times[candidate]

    def difference_error_s(self, first: Candidate, second: Candidate) -> float:
        """Returns how far the difference of two candidates' seconds per sample may be off."""
        rates = efficiency(self.workload.cluster, self.workload.measured)
        scales = (1 / self.samples(first), 1 / self.samples(second))
        return difference_error_s(self.speeds[first], self.speeds[second], rates, scales=scales)

    def samples(self, candidate: Candidate) -> int:
        """Returns the samples of a step."""
        return data_parallel_ranks(self.workload.cluster, candidate.way) * candidate.micro_batch * candidate.grad_accum

    def may_fit(self, candidate: Candidate) -> bool:
        """Returns whether the bound leaves room; an excluded candidate needs no estimate."""
        least, cluster = self.bound(candidate), self.workload.cluster
        fits_gpu = least.device_bytes(candidate.micro_batch) <= self.usable_ratio * cluster.gpu.memory_bytes
        fits_gpu = fits_gpu and least.load_bytes <= cluster.gpu.memory_bytes
        return fits_gpu and least.host_bytes <= USABLE_HOST_RATIO * cluster.host_memory_bytes

    def seems_to_fit(self, candidate: Candidate) -> bool:
        """Returns whether the candidate fits or, before it is verified, may fit."""
        estimate = self.estimate(candidate)
        if candidate in self.exact:
            return estimate.fits
        needs, most = estimate.memory, 1 + QUICK_ERROR_RATIO
        least = needs.device_bytes_per_gpu - needs.breakdown_bytes.fragmentation
        fits_host = needs.host_bytes_per_node <= most * estimate.usable_bytes_per_host
        return needs.load.fits_gpu and fits_host and least <= most * estimate.usable_bytes_per_gpu

    def verify(self, candidate: Candidate) -> Estimate:
        """Returns the exact estimate, which from then on is the candidate's.

        Replays the allocator only if its upper bound does not fit and the live bytes do.
        """
        if candidate not in self.exact:
            self.exact.add(candidate)
            for detail in (Detail.ENGINE, Detail.REPLAYED):
                self.estimates[candidate] = assess(
                    self.workload,
                    candidate.configuration(self.workload.model),
                    detail=detail,
                    usable_gpu_ratio=self.usable_ratio,
                )
                if self.estimates[candidate].fits or not _is_live_room(self.estimates[candidate]):
                    break
        return self.estimates[candidate]

    def has_gpu_room(self, candidate: Candidate) -> bool:
        """Returns whether the GPU holds what lives, whatever the allocator reserves; exact."""
        return _is_gpu_room(self.verify(candidate))

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate, made once."""
        if candidate not in self.estimates:
            configuration = candidate.configuration(self.workload.model)
            self.estimates[candidate] = estimated(self.workload, configuration, usable_gpu_ratio=self.usable_ratio)
        return self.estimates[candidate]


def _is_live_room(estimate: Estimate) -> bool:
    """Returns whether it would fit if the allocator held only live bytes."""
    return estimate.fits_host and _is_gpu_room(estimate)


def _is_gpu_room(estimate: Estimate) -> bool:
    least = estimate.memory.device_bytes_per_gpu - estimate.memory.breakdown_bytes.fragmentation
    return estimate.memory.load.fits_gpu and least <= estimate.usable_bytes_per_gpu


def estimated(
    workload: Workload, configuration: Configuration, *, usable_gpu_ratio: float = USABLE_GPU_RATIO
) -> Estimate:
    """Returns the quick estimate, accurate to a few percent."""
    return assess(workload, configuration, detail=Detail.QUICK, usable_gpu_ratio=usable_gpu_ratio)


def usable_ratio(request: Request) -> float:
    """Returns the share of a GPU that a plan may fill: all of it if the request is one configuration."""
    return ASKED_GPU_RATIO if request.is_one_configuration else USABLE_GPU_RATIO
