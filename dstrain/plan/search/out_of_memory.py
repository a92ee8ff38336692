"""The smallest changes by which a run fits that has run out of GPU memory, by what was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dstrain.choices import LossKernel, Offload
from dstrain.facts.workload import Workload
from dstrain.oom import Allocator, Phase
from dstrain.plan.configuration import Checkpointing, Configuration, flat
from dstrain.plan.estimate import USABLE_GPU_RATIO, assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.search.evaluator import Evaluator, Key
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import EQUAL_RATIO, by_time
from dstrain.plan.search.search_space import PERIODS, Candidate, with_batch
from dstrain.plan.speed.step_time import speed
from dstrain.units import MIB

NUM_FIXES = 3
"""Changes that are proposed."""
SHORTEST = 256
"""Tokens of the shortest sequence that is proposed."""

_LOSSES = (LossKernel.FULL, LossKernel.CHUNKED, LossKernel.FUSED)
"""Losses, each with less memory than the last."""
_OFFLOADS = (Offload.NONE, Offload.OPTIMIZER, Offload.PARAMS)
"""What leaves the GPU, each more than the last; NVMe needs a folder that only the user knows."""
_ONLY_STATES = (Phase.LOAD, Phase.SAVE)
"""Phases in which there is no micro-batch."""
LEVERS = (
    *("micro_batch", "grad_ckpt", "grad_ckpt_every_n_layers", "activation_offload", "tiled_mlp", "loss"),
    *("zero_stage", "offload", "seq_len"),
)
"""Choices that a change may make otherwise, by the names of `configuration.choices`."""
_FOLLOWING = frozenset({"grad_ckpt_every_n_layers"})
"""A choice that is a part of another one and does not count as a lever of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What was missing, as measured and as compared with the plan, in bytes of PyTorch's allocator."""

    phase: Phase
    limit_bytes: int
    """What the allocator could have held."""
    needed_bytes: int
    """The least that it would have held after the allocation that failed."""
    predicted_bytes: int
    """What the plan says that it holds."""

    @property
    def excess_bytes(self) -> int:
        """The least by which the plan is too low."""
        return max(0, self.needed_bytes - self.predicted_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change that fits."""

    estimate: Estimate
    """The changed configuration, on a GPU that is smaller by what the plan was too low."""
    levers: frozenset[str]
    """The choices that it makes otherwise, by the names of `configuration.choices`."""
    step_ratio: float | None
    """How much longer a step takes, as a share of the time before; None if the speed is unknown."""

    @property
    def keeps_batch(self) -> bool:
        """Whether a step has the same tokens as before."""
        return "seq_len" not in self.levers


class _Variation(Candidate):
    """The configuration of a run with some choices made otherwise; the engine's buffers stay as they are."""

    __slots__ = ()

    def configuration(self, model: object) -> Configuration:
        """Returns the whole configuration."""
        return with_batch(self.way, self.micro_batch, self.grad_accum)


class _Change(NamedTuple):
    """A candidate, and what it changes."""

    candidate: Candidate
    levers: frozenset[str]


def shortage(workload: Workload, estimate: Estimate, phase: Phase, measured: Allocator) -> Shortage:
    """Returns what was missing. What an allocation needs at last is unknown: the measured need is the least."""
    memory, parts = estimate.memory, estimate.memory.breakdown_bytes
    outside = outside_bytes(workload.cluster, estimate.configuration, workload.measured)
    predicted = memory.device_bytes_per_gpu - outside
    if phase is Phase.LOAD:  # the engine makes its states before the first step
        loaded = memory.load.device_bytes_per_gpu - outside
        predicted = max(loaded, parts.params + parts.grads + parts.optimizer + parts.buffers)
    return Shortage(
        phase=phase,
        limit_bytes=measured.limit_bytes,
        needed_bytes=max(measured.needed_bytes, measured.limit_bytes),
        predicted_bytes=predicted,
    )


def smaller(workload: Workload, configuration: Configuration, short: Shortage) -> Workload:
    """Returns the workload on a GPU that the plan can trust: what PyTorch could hold, less the excess over the plan.

    The excess counts in full, however little a configuration needs: what the plan leaves out is often the same for all.
    """
    usable = short.limit_bytes - short.excess_bytes + outside_bytes(workload.cluster, configuration, workload.measured)
    gpu = replace(workload.cluster.gpu, memory_mib=max(1, usable // MIB))
    return replace(workload, cluster=replace(workload.cluster, gpu=gpu))


def fixes(
    workload: Workload, estimate: Estimate, short: Shortage, *, stages: Collection[int] = (0, 1, 2, 3)
) -> tuple[Fix, ...]:
    """Returns changes that fit and keep the global batch, the fastest first; they differ in the levers they use.

    The space: smaller micro-batches with more accumulation × more recomputation × losses with less memory × higher
    stages among `stages` × more offload. Every change is verified with replays of engine and allocator, and leaves a
    tenth of the memory free, as plans do. The first one is the fastest of all; the others use the fewest levers, none
    of them all that another one does. Where no speed is known, those with the fewest levers come first. If fewer than
    three are found, a shorter sequence is the last, which does not keep the tokens of a step.
    """
    current = estimate.configuration
    less = smaller(workload, current, short)
    evaluator = Evaluator(less, USABLE_GPU_RATIO)
    candidates = _space(less, current, short.phase, stages)
    space = [_Change(candidate, levers(current, candidate)) for candidate in candidates]
    knows_speed = speed(workload, current) is not None
    first = _fastest(evaluator, space) if knows_speed else None
    found = [] if first is None else [first]
    for count in range(1, len(LEVERS) + 1):
        few = [change for change in space if len(change.levers - _FOLLOWING) == count]
        while len(found) < NUM_FIXES:
            few = [change for change in few if not any(other.levers <= change.levers for other in found)]
            further = _fastest(evaluator, few)
            if further is None:
                break
            found.append(further)
    if len(found) < NUM_FIXES and short.phase not in _ONLY_STATES:
        found += _shorter(evaluator, current)
    if knows_speed:
        found.sort(key=lambda one: ("seq_len" in one.levers, evaluator.time(one.candidate)))
    return tuple(_fix(workload, current, evaluator.verify(one.candidate), one.levers) for one in found)


def levers(current: Configuration, candidate: Candidate) -> frozenset[str]:
    """Returns the names of the choices that a candidate makes otherwise."""
    before, after = flat(current), flat(with_batch(candidate.way, candidate.micro_batch, candidate.grad_accum))
    return frozenset(name for name in LEVERS if before[name] != after[name])


def evaluated_at_once(short: Shortage, estimate: Estimate, eval_micro_batch: int) -> int | None:
    """Returns the largest smaller micro-batch of an evaluation that fits by what was measured; None if one is too many.

    What an evaluation holds beside the model states grows with its micro-batch.
    """
    resident = estimate.memory.states.device
    per_row = max(0, short.needed_bytes - resident) / eval_micro_batch
    most = int((USABLE_GPU_RATIO * short.limit_bytes - resident) / per_row) if per_row else 0
    smaller_one = min(most, eval_micro_batch - 1)
    return 2 ** (smaller_one.bit_length() - 1) if smaller_one >= 1 else None


def _space(workload: Workload, current: Configuration, phase: Phase, stages: Collection[int]) -> Iterator[Candidate]:
    """Yields every candidate, the current configuration not among them."""
    already = {rule.name for rule in broken(workload, current)}
    total = current.batch.micro_batch * current.step.grad_accum
    sizes = [size for size in range(current.batch.micro_batch, 0, -1) if total % size == 0]
    for way in _ways(workload, current, phase, stages):
        if any(rule.name not in already for rule in broken(workload, way)):
            continue
        for size in sizes[:1] if phase in _ONLY_STATES else sizes:
            if size != current.batch.micro_batch or way != current:
                yield _Variation(way, size, total // size, None, way.zero.pin_memory)


def _ways(workload: Workload, current: Configuration, phase: Phase, stages: Collection[int]) -> Iterator[Configuration]:
    zero, kernels = current.zero, current.kernels
    losses: tuple[LossKernel, ...] = (kernels.loss,)
    recomputations = [current.checkpointing]
    if phase not in _ONLY_STATES:
        losses = _LOSSES[_LOSSES.index(kernels.loss) :] if kernels.loss in _LOSSES else losses
        recomputations = list(_recomputations(current.checkpointing, in_ram=not workload.cluster.gpu.is_cpu))
    offloads = _OFFLOADS[_OFFLOADS.index(zero.offload) :] if zero.offload in _OFFLOADS else (zero.offload,)
    for stage in (stage for stage in range(zero.stage, 4) if stage == zero.stage or stage in stages):
        for offload in offloads:
            ratio = zero.offload_ratio if offload is zero.offload else 1.0
            shared = replace(zero, stage=stage, offload=offload, offload_ratio=ratio)
            for checkpointing in recomputations:
                for loss in losses:
                    changed = replace(kernels, loss=loss)
                    yield replace(current, zero=shared, checkpointing=checkpointing, kernels=changed)


def _recomputations(current: Checkpointing, *, in_ram: bool) -> Iterator[Checkpointing]:
    """Yields the current choice, and those that keep less: more layers, then tiled MLPs and inputs in RAM."""
    yield current
    for period in sorted(PERIODS, reverse=True):
        if not current.enabled or period < current.every_n_layers:
            yield replace(current, enabled=True, every_n_layers=period)
    whole = replace(current, enabled=True, every_n_layers=1)
    for offload in sorted({current.offload, current.offload or in_ram}):
        for tiled in sorted({current.tiled_mlp, True}):
            if (offload, tiled) != (current.offload, current.tiled_mlp):
                yield replace(whole, offload=offload, tiled_mlp=tiled)


def _fastest(evaluator: Evaluator, changes: Sequence[_Change]) -> _Change | None:
    """Returns the fastest change that fits, of equally fast ones that with the fewest levers; None if none fits."""
    best, best_key = None, None
    by_candidate = {change.candidate: change for change in changes}
    for candidate in by_time(evaluator, by_candidate):
        change, key = by_candidate[candidate], evaluator.time(candidate)
        if best_key is not None and not _is_equal(key, best_key):
            break
        if best is not None and len(change.levers) >= len(best.levers):
            continue
        if evaluator.seems_to_fit(candidate) and _fits(evaluator, candidate):
            best, best_key = change, best_key or key
    return best


def _fits(evaluator: Evaluator, candidate: Candidate) -> bool:
    """Returns whether a candidate fits with all that the replayed allocator keeps: it never gives back its cache."""
    if not evaluator.verify(candidate).fits:
        return False
    workload, ratio = evaluator.workload, evaluator.usable_ratio
    estimate = assess(workload, candidate.configuration(workload.model), usable_gpu_ratio=ratio)
    most = estimate.memory.reserved_bytes_per_gpu + estimate.memory.breakdown_bytes.context
    return most <= estimate.usable_bytes_per_gpu


def _is_equal(key: Key, other: Key) -> bool:
    """Returns whether times, or places in the order of lost speed, are called equal."""
    return key == other if len(key) > 1 else key[0] <= (1 + EQUAL_RATIO) * other[0]


def _shorter(evaluator: Evaluator, current: Configuration) -> Iterator[_Change]:
    """Yields the configuration with the longest sequence of half the length, a quarter … that fits."""
    seq_len = current.batch.seq_len // 2
    while seq_len >= SHORTEST:
        way = replace(current, batch=replace(current.batch, seq_len=seq_len))
        candidate = _Variation(way, current.batch.micro_batch, current.step.grad_accum, None, way.zero.pin_memory)
        if _fits(evaluator, candidate):
            yield _Change(candidate, levers(current, candidate))
            return
        seq_len //= 2


def _fix(workload: Workload, before: Configuration, estimate: Estimate, changed: frozenset[str]) -> Fix:
    """Returns a change with its price; a step that ran out of memory is priced without the allocator's retries."""
    known, ratio = speed(workload, before), None
    if estimate.speed is not None and known is not None:
        ratio = estimate.speed.step_s / known.step_s - 1
    return Fix(estimate=estimate, levers=changed, step_ratio=ratio)
