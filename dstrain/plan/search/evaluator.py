"""What a search knows of its candidates, each computed once: bounds, times and estimates; and whether one fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dstrain.choices import Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import ASKED_GPU_RATIO, USABLE_GPU_RATIO, USABLE_HOST_RATIO, assess
from dstrain.plan.estimate_records import Estimate, Speed
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.memory import host_bytes
from dstrain.plan.memory.peak import Detail
from dstrain.plan.request import Request
from dstrain.plan.search.bounds import Bound, bound
from dstrain.plan.search.buffer_sizes import TIGHT
from dstrain.plan.search.search_space import Candidate, data_parallel_ranks, space
from dstrain.plan.speed.efficiency import efficiency
from dstrain.plan.speed.step_time import difference_error_s, speed

QUICK_ERROR_RATIO = 0.10
"""The most by which quick estimates of live bytes exceed exact ones below ZeRO-3. The bytes that the allocator holds
besides are bounded from above, and count only once they are replayed. Source: tests/plan/memory/test_closed_form.py."""

SATURATING_TOKENS = 4096
"""Tokens of a micro-batch from which matrix products run near their best; a smaller one loses speed first.
Source: achievable-FLOP/s sweeps of stas00/ml-engineering (2,048 and more for h of 4,096 and more)."""
LARGEST_TOKENS = 16384
"""Tokens of a micro-batch beyond which larger ones are no faster."""

Key = tuple[float, ...]
"""Sort key of candidates: seconds per sample or, if speed is unknown, the order of lost speed."""


@dataclass(slots=True)
class Evaluator:
    """Caches the bounds, times and estimates of the candidates of one search."""

    workload: Workload
    usable_ratio: float
    configurations: dict[Candidate, Configuration] = field(default_factory=dict)
    bounds: dict[int, tuple[Bound, Configuration]] = field(default_factory=dict)
    """By the identity of the way, which is kept so that no other one gets it."""
    speeds: dict[Candidate, Speed | None] = field(default_factory=dict)
    hosts: dict[tuple[object, ...], int] = field(default_factory=dict)
    estimates: dict[Candidate, Estimate] = field(default_factory=dict)
    exact: set[Candidate] = field(default_factory=set)
    """Candidates whose estimates are exact."""
    smallest: dict[int, Candidate] = field(default_factory=dict)
    """The candidate of least micro-batch and buffers, by the identity of its way: if it does not fit, none of the way
    does. ZeRO-3's alone, without hpZ, which needs no more memory to accumulate gradients."""
    failing: set[Candidate] = field(default_factory=set)
    """Candidates that do not fit, although their estimates may not tell."""

    def space(self, request: Request) -> list[Candidate]:
        """Returns the candidates of a request."""
        candidates = space(self.workload, request)
        for candidate in candidates:
            if candidate.way.zero.stage == 3 and candidate.way.zero.hpz == 1:
                known = self.smallest.setdefault(id(candidate.way), candidate)
                if (candidate.micro_batch, candidate.rung or 0) < (known.micro_batch, known.rung or 0):
                    self.smallest[id(candidate.way)] = candidate
        return candidates

    def configuration(self, candidate: Candidate) -> Configuration:
        """Returns the whole configuration of a candidate, written out once."""
        if candidate not in self.configurations:
            self.configurations[candidate] = candidate.configuration(self.workload.model)
        return self.configurations[candidate]

    def bound(self, candidate: Candidate) -> Bound:
        """Returns the bound of a candidate's way, computed once."""
        if id(way := candidate.way) not in self.bounds:
            self.bounds[id(way)] = bound(self.workload, way), way
        return self.bounds[id(way)][0]

    def time(self, candidate: Candidate) -> Key:
        """Returns the seconds of one sample of a step, by which plans of different batches compare; the place in the
        order of lost speed if the GPU's speed is unknown."""
        if candidate not in self.speeds:
            self.speeds[candidate] = speed(self.workload, self.configuration(candidate))
        known = self.speeds[candidate]
        if known is None:
            return lost_speed(self.workload.cluster, candidate)
        return (known.step_s / self.samples(candidate),)

    def difference_error_s(self, first: Candidate, second: Candidate) -> float:
        """Returns how far the difference of two candidates' seconds per sample may be off."""
        rates = efficiency(self.workload.cluster, self.workload.measured)
        one, other = self.speeds[first], self.speeds[second]
        assert one is not None
        assert other is not None
        return difference_error_s(one, other, rates, scales=(1 / self.samples(first), 1 / self.samples(second)))

    def samples(self, candidate: Candidate) -> int:
        """Returns the samples of a step."""
        return data_parallel_ranks(self.workload.cluster, candidate.way) * candidate.micro_batch * candidate.grad_accum

    def live_bytes(self, candidate: Candidate) -> int:
        """Returns the live bytes of a candidate on one GPU, as its estimate has them now."""
        return self.estimate(candidate).memory.live_bytes_per_gpu

    def may_fit(self, candidate: Candidate) -> bool:
        """Returns whether the bound leaves room; an excluded candidate needs no estimate."""
        least, cluster = self.bound(candidate), self.workload.cluster
        device = least.device_bytes(candidate.micro_batch, candidate.grad_accum)
        fits_gpu = device <= self.usable_ratio * cluster.gpu.memory_bytes
        fits_gpu = fits_gpu and least.load_bytes <= cluster.gpu.memory_bytes
        return fits_gpu and least.host_bytes <= USABLE_HOST_RATIO * cluster.host_memory_bytes

    def fits(self, candidate: Candidate) -> bool:
        """Returns whether a candidate fits by an exact estimate, which is made only if a quick one does not tell.

        What fits is replayed in full; a replay of what does not fit ends as soon as that is known.
        """
        if candidate in self.exact:
            return self.estimates[candidate].fits
        if self.seems_to_fit(candidate) and (
            not self._is_open(candidate) or self._assessed(candidate, Detail.USABLE).fits_gpu
        ):
            return self.verify(candidate).fits
        self.failing.add(candidate)
        return False

    def verify(self, candidate: Candidate) -> Estimate:
        """Returns the exact estimate, which from then on is the candidate's.

        Replays the engine where the quick estimate of live bytes is off, and the allocator only if the GPU could hold
        the least that it may take, but not the most.
        """
        if candidate not in self.exact:
            if self._is_open(candidate):
                self.estimates[candidate] = self._assessed(candidate, Detail.REPLAYED)
            self.exact.add(candidate)
        return self.estimates[candidate]

    def _is_open(self, candidate: Candidate) -> bool:
        """Returns whether exact live bytes leave open if the GPU can hold a candidate."""
        estimate = self.estimate(candidate)
        if self._error_ratio(candidate):
            self.estimates[candidate] = estimate = self._assessed(candidate, Detail.ENGINE)
        is_room = estimate.memory.load.fits_gpu and least_bytes(estimate) <= estimate.usable_bytes_per_gpu
        return is_room and not estimate.fits_gpu

    def seems_to_fit(self, candidate: Candidate, *, is_sure: bool = False) -> bool:
        """Returns whether the candidate fits or, before it is verified, may fit as far as its estimate may be off.

        `is_sure` takes the estimate of live bytes as it is.
        """
        if candidate in self.exact:
            return self.estimates[candidate].fits
        return (
            candidate not in self.failing
            and self.has_host_room(candidate)
            and self.seems_to_fit_gpu(candidate, is_sure=is_sure)
        )

    def seems_to_fit_gpu(self, candidate: Candidate, *, is_sure: bool = False) -> bool:
        """Returns the same of the GPU alone."""
        least = self.smallest.get(id(candidate.way), candidate)
        if least is not candidate and not self.seems_to_fit_gpu(least):
            return False
        estimate = self.estimate(candidate)
        if candidate in self.exact:
            return estimate.fits_gpu
        most = (1 + (0.0 if is_sure else self._error_ratio(candidate))) * estimate.usable_bytes_per_gpu
        return estimate.memory.load.fits_gpu and least_bytes(estimate) <= most

    def _error_ratio(self, candidate: Candidate) -> float:
        """Returns by how much the quick estimate of live bytes may exceed the exact one: it is exact under ZeRO-3."""
        is_exact = candidate.way.zero.stage == 3 and has_layer_code(self.workload.model)
        return 0.0 if is_exact else QUICK_ERROR_RATIO

    def has_host_room(self, candidate: Candidate) -> bool:
        """Returns whether the RAM of a node holds what a candidate needs there."""
        return self.host_bytes(candidate) <= USABLE_HOST_RATIO * self.workload.cluster.host_memory_bytes

    def host_bytes(self, candidate: Candidate) -> int:
        """Returns the host RAM of one node, which is exact: the same for all batches whose inputs do not wait there."""
        way = candidate.way
        waiting = (way.checkpointing, candidate.micro_batch) if way.checkpointing.offload else None
        key = (id(way.zero), way.parallel, candidate.rung, candidate.pin_memory, candidate.grad_accum > 1, waiting)
        if key not in self.hosts:
            self.hosts[key] = host_bytes(self.workload, self.configuration(candidate))
        return self.hosts[key]

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate, made once."""
        if candidate not in self.estimates:
            self.estimates[candidate] = self._assessed(candidate, Detail.QUICK)
        return self.estimates[candidate]

    def _assessed(self, candidate: Candidate, detail: Detail) -> Estimate:
        written = self.configuration(candidate)
        return assess(self.workload, written, detail=detail, usable_gpu_ratio=self.usable_ratio)


def lost_speed(cluster: Cluster, candidate: Candidate) -> tuple[float, ...]:
    """Returns the place of a candidate in the order of lost speed, where no time can be predicted.

    Outermost first: what leaves the GPU; SP and TP; micro-batches from the one that saturates the GPU down to 1;
    without and with checkpointing, of few layers first, and with inputs that stay; the stages, ZeRO-1 before 2 where it
    reduces less often, ZeRO-0 last; roomy and then tight buffers; then larger micro-batches, up to `LARGEST_TOKENS`.
    """
    way = candidate.way
    tokens = way.batch.seq_len / way.parallel.sp
    saturating = 2 ** max(0, math.ceil(math.log2(SATURATING_TOKENS / tokens)))
    stages = (1, 2, 3, 0) if candidate.grad_accum > 1 and cluster.num_gpus > 1 else (2, 1, 3, 0)
    return (
        candidate.micro_batch * tokens > LARGEST_TOKENS and candidate.micro_batch > 1,
        list(Offload).index(way.zero.offload),
        way.parallel.sp * way.parallel.tp,
        -min(candidate.micro_batch, saturating),
        way.checkpointing.enabled,
        -way.checkpointing.every_n_layers,
        way.checkpointing.offload,
        way.checkpointing.tiled_mlp,
        stages.index(way.zero.stage),
        way.zero.hpz,
        way.zero.offload_ratio,
        candidate.rung == TIGHT,
        not candidate.pin_memory,
        -candidate.micro_batch,
    )


def least_bytes(estimate: Estimate) -> int:
    """Returns what the GPU holds at least: streams at their own peaks, where that is known, else all live bytes."""
    return estimate.memory.breakdown_bytes.context + estimate.memory.least_reserved_bytes_per_gpu


def estimated(
    workload: Workload, configuration: Configuration, *, usable_gpu_ratio: float = USABLE_GPU_RATIO
) -> Estimate:
    """Returns the quick estimate, accurate to a few percent."""
    return assess(workload, configuration, detail=Detail.QUICK, usable_gpu_ratio=usable_gpu_ratio)


def usable_ratio(request: Request) -> float:
    """Returns the share of a GPU that a plan may fill: all of it if the request is one configuration."""
    return ASKED_GPU_RATIO if request.is_one_configuration else USABLE_GPU_RATIO
