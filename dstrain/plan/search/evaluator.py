"""Memoised bounds, step times and estimates, one per candidate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain, islice

from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import ASKED_GPU_RATIO, USABLE_GPU_RATIO, USABLE_HOST_RATIO, assess
from dstrain.plan.estimate_records import Estimate, Speed
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.memory import host_bytes
from dstrain.plan.memory.peak import Detail
from dstrain.plan.request import Request
from dstrain.plan.search.appetite import Failures, appetite_of, kind_of
from dstrain.plan.search.bounds import Bound, bound, end_s, passes_s
from dstrain.plan.search.search_space import Candidate, data_parallel_ranks, space
from dstrain.plan.speed.efficiency import efficiency
from dstrain.plan.speed.step_time import difference_error_s, speed

QUICK_ERROR_RATIO = 0.10
"""The most by which quick estimates of live bytes exceed exact ones below ZeRO-3. The bytes that the allocator holds
besides are bounded from above, and count only once they are replayed. Source: tests/plan/memory/test_closed_form.py."""

ALIKE_RATIO = 0.01
"""The most by which bytes of two candidates of one appetite differ: SP ranks that have parts of more samples have
smaller tables of positions, and masks. Source: tests/plan/search/test_bounds.py."""

SCATTER_RATIO = 0.15
"""The most by which what the allocator holds for a candidate exceeds what it holds for one of a larger appetite, whose
blocks happen to fit better. Source: tests/plan/search/test_bounds.py."""

MOST_MISSES, PROPOSAL_MISSES = 6, 3
"""Candidates that may turn out not to fit before no more are looked for: for an alternative, and for a proposal, which
then is the one of least memory."""

Shortage = tuple[bool, int]
"""Whether the GPU could not hold a candidate; and the bytes that it needs there or, if it could, in host RAM."""
Key = tuple[float, ...]
"""Sort key of candidates: seconds per sample or, if speed is unknown, the order of lost speed."""


@dataclass(slots=True)
class Evaluator:
    """Caches the bounds, times and estimates of the candidates of one search."""

    workload: Workload
    usable_ratio: float
    spaces: dict[Request, list[Candidate]] = field(default_factory=dict)
    configurations: dict[Candidate, Configuration] = field(default_factory=dict)
    bounds: dict[int, tuple[Bound, Configuration]] = field(default_factory=dict)
    """By the identity of the way, which is kept so that no other one gets it."""
    least_s: dict[object, float] = field(default_factory=dict)
    times: dict[Candidate, Key | None] = field(default_factory=dict)
    speeds: dict[Candidate, Speed] = field(default_factory=dict)
    hosts: dict[tuple[object, ...], int] = field(default_factory=dict)
    estimates: dict[Candidate, Estimate] = field(default_factory=dict)
    exact: set[Candidate] = field(default_factory=set)
    fitting: set[Candidate] = field(default_factory=set)
    """Candidates that fit, with the most that they take."""
    hopeless: set[Candidate] = field(default_factory=set)
    """Candidates that do not fit, without having been verified."""
    kin: dict[object, list[Candidate]] = field(default_factory=lambda: defaultdict(list))
    """Candidates whose appetites can be compared, as long as none of them has failed."""
    kinless: list[Candidate] = field(default_factory=list)
    """Candidates that are yet to be sorted by kin, when the first one fails."""
    failures: Failures = field(default_factory=Failures)

    def space(self, request: Request) -> list[Candidate]:
        """Returns the candidates of a request, the same ones each time."""
        if request not in self.spaces:
            self.spaces[request] = space(self.workload, request)
            self.kinless += self.spaces[request]
        return self.spaces[request]

    def afresh(self) -> Evaluator:
        """Returns an evaluator of the same candidates and bounds that has estimated nothing."""
        evaluator = Evaluator(self.workload, self.usable_ratio, dict(self.spaces), bounds=self.bounds, hosts=self.hosts)
        evaluator.kinless += chain.from_iterable(self.spaces.values())
        return evaluator

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

    def least_time(self, candidate: Candidate) -> Key:
        """Returns a bound of `time`: passes depend on few choices, a step's end on the way; each is computed once."""
        self.bound(candidate)  # keeps the way
        way, micro_batch = candidate.way, candidate.micro_batch
        key = (way.parallel, way.checkpointing, way.kernels, way.zero.stage == 3, micro_batch)
        if key not in self.least_s:
            self.least_s[key] = passes_s(self.workload, way, micro_batch)
        if id(way) not in self.least_s:
            self.least_s[id(way)] = end_s(self.workload, way)
        return ((candidate.grad_accum * self.least_s[key] + self.least_s[id(way)]) / self.samples(candidate),)

    def time(self, candidate: Candidate) -> Key | None:
        """Returns the seconds of one sample of a step, by which plans of different batches compare; None if the GPU's
        speed is unknown."""
        if candidate not in self.times:
            known = speed(self.workload, self.configuration(candidate))
            self.times[candidate] = None
            if known is not None:
                self.times[candidate] = (known.step_s / self.samples(candidate),)
                self.speeds[candidate] = known
        return self.times[candidate]

    def difference_error_s(self, first: Candidate, second: Candidate) -> float:
        """Returns how far the difference of two candidates' seconds per sample may be off."""
        rates = efficiency(self.workload.cluster, self.workload.measured)
        one, other = self.speeds[first], self.speeds[second]
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

    def seems_to_fit(self, candidate: Candidate, is_sure: bool = False) -> bool:
        """Returns whether the candidate fits or, before it is verified, may fit as far as its estimate may be off.

        `is_sure` takes the estimate of live bytes as it is.
        """
        if candidate in self.exact:
            return self.estimates[candidate].fits
        if candidate not in self.hopeless and self._fails(candidate):
            self.hopeless.add(candidate)
        return candidate not in self.hopeless and self._seems_to_fit_gpu(candidate, is_sure)

    def seems_to_hold_all(self, candidate: Candidate) -> bool:
        """Returns whether the candidate fits by its estimate, with all that the allocator may hold besides live bytes.

        Verifying it replays the allocator only if the exact bytes exceed the quick ones. What does not fit so rules out
        all that needs more, in a search that asks for nothing else.
        """
        if candidate in self.exact:
            return self.estimates[candidate].fits
        if candidate not in self.hopeless and not self._holds_all(candidate):
            self.hopeless.add(candidate)
        return candidate not in self.hopeless

    def forget_failures(self) -> None:
        """Forgets what does not fit, except by exact estimates."""
        self.hopeless.clear()
        self.failures.forget()

    def _holds_all(self, candidate: Candidate) -> bool:
        if self._is_known_to_fail(candidate) or not self._is_host_room(candidate):
            return False
        if self.estimate(candidate).fits_gpu:
            return True
        for failed in (candidate, *self._least_of_kin(candidate)):
            if not self.estimate(failed).fits_gpu:
                self.failures.too_large[kind_of(failed)].append(appetite_of(failed))
        return False

    def _fails(self, candidate: Candidate) -> bool:
        """Returns whether the candidate cannot fit, and notes what that says of others."""
        if self._is_known_to_fail(candidate) or not self._is_host_room(candidate):
            return True
        self.estimate(candidate)
        self._learn(candidate, self._error_ratio(candidate))
        if self._seems_to_fit_gpu(candidate):
            return False
        for least in self._least_of_kin(candidate):
            self.estimate(least)
            self._learn(least, self._error_ratio(least))
        return True

    def _least_of_kin(self, failed: Candidate) -> list[Candidate]:
        """Returns the candidate of least appetite once one of its kin has failed: it tells whether any of them fits."""
        for candidate in self.kinless:
            self.kin[kind_of(candidate), candidate.way.parallel.sp].append(candidate)
        self.kinless.clear()
        kin = self.kin.pop((kind_of(failed), failed.way.parallel.sp), [])
        return list(islice((each for each in sorted(kin, key=appetite_of) if self._is_host_room(each)), 1))

    def shortage(self, candidate: Candidate) -> Shortage:
        """Returns how far a candidate is from fitting: what the GPU could hold is nearer than what it could not."""
        fits, needs = self._seems_to_fit_gpu(candidate), self.estimate(candidate).memory
        return not fits, needs.host_bytes_per_node if fits else needs.needed_bytes_per_gpu

    def _error_ratio(self, candidate: Candidate) -> float:
        """Returns by how much the quick estimate of live bytes may exceed the exact one: it is exact under ZeRO-3."""
        is_exact = candidate.way.zero.stage == 3 and has_layer_code(self.workload.model)
        return 0.0 if is_exact else QUICK_ERROR_RATIO

    def _seems_to_fit_gpu(self, candidate: Candidate, is_sure: bool = False) -> bool:
        estimate = self.estimate(candidate)
        if candidate in self.exact:
            return estimate.fits_gpu
        most = (1 + (0.0 if is_sure else self._error_ratio(candidate))) * estimate.usable_bytes_per_gpu
        return estimate.memory.load.fits_gpu and least_bytes(estimate) <= most

    def _is_host_room(self, candidate: Candidate) -> bool:
        return self.host_bytes(candidate) <= USABLE_HOST_RATIO * self.workload.cluster.host_memory_bytes

    def host_bytes(self, candidate: Candidate) -> int:
        """Returns the host RAM of one node, which is exact: the same for all batches whose inputs do not wait there."""
        way = candidate.way
        waiting = (way.checkpointing, candidate.micro_batch) if way.checkpointing.offload else None
        key = (id(way.zero), way.parallel, candidate.rung, candidate.pin_memory, candidate.grad_accum > 1, waiting)
        if key not in self.hosts:
            self.hosts[key] = host_bytes(self.workload, self.configuration(candidate))
        return self.hosts[key]

    def fits(self, candidate: Candidate, in_full: bool = True) -> bool:
        """Returns whether a candidate fits, replayed as far as that takes; one that does is verified `in_full`."""
        if candidate not in self.exact | self.fitting and self._is_open(candidate):
            runs_out = self.estimates[candidate].memory.device_bytes_per_gpu > self.workload.cluster.gpu.memory_bytes
            estimate = self._assessed(candidate, Detail.USABLE)
            if estimate.fits_gpu:
                self.estimates[candidate] = estimate
                self.fitting.add(candidate)
            elif not runs_out:
                self.hopeless.add(candidate)
                self.failures.overflowing[kind_of(candidate)].append(candidate)
                return False
        return (self.verify if in_full or candidate not in self.fitting else self.estimate)(candidate).fits

    def verify(self, candidate: Candidate) -> Estimate:
        """Returns the exact estimate, which from then on is the candidate's.

        Replays the engine where the quick estimate of live bytes is off, and the allocator only if the GPU could hold
        the least that it may take, but not the most.
        """
        if candidate not in self.exact:
            if candidate in self.fitting or self._is_open(candidate):
                self.estimates[candidate] = self._assessed(candidate, Detail.REPLAYED)
            self.exact.add(candidate)
            self._learn(candidate)
        return self.estimates[candidate]

    def _is_open(self, candidate: Candidate) -> bool:
        """Returns whether exact live bytes leave open if the GPU can hold a candidate."""
        estimate = self.estimate(candidate)
        if self._error_ratio(candidate):
            self.estimates[candidate] = estimate = self._assessed(candidate, Detail.ENGINE)
        is_room = estimate.memory.load.fits_gpu and least_bytes(estimate) <= estimate.usable_bytes_per_gpu
        return is_room and not estimate.fits_gpu

    def _assessed(self, candidate: Candidate, detail: Detail) -> Estimate:
        written = self.configuration(candidate)
        return assess(self.workload, written, detail=detail, usable_gpu_ratio=self.usable_ratio)

    def _learn(self, candidate: Candidate, error_ratio: float = 0.0) -> None:
        """Notes what the failure of a candidate, whose estimate is off by no more than that, says of others."""
        estimate = self.estimates[candidate]
        most = (1 + ALIKE_RATIO) * (1 + error_ratio) * estimate.usable_bytes_per_gpu
        held = estimate.memory.device_bytes_per_gpu if candidate in self.exact else 0
        if least_bytes(estimate) > most or held > (1 + SCATTER_RATIO) * most:
            self.failures.too_large[kind_of(candidate)].append(appetite_of(candidate))
        elif held > most:
            self.failures.too_scattered[kind_of(candidate)].append(appetite_of(candidate))

    def _is_known_to_fail(self, candidate: Candidate) -> bool:
        """Returns whether the failures of others tell that a candidate fails."""
        for other in self.failures.to_verify(candidate):
            self.verify(other)
        return self.failures.say_enough(candidate)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate, made once."""
        if candidate not in self.estimates:
            self.estimates[candidate] = self._assessed(candidate, Detail.QUICK)
        return self.estimates[candidate]


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
