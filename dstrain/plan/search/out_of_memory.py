"""The smallest changes by which a run fits that has run out of GPU memory, by what was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.choices import Offload
from dstrain.facts.workload import Workload
from dstrain.oom import Allocator, Phase
from dstrain.plan.configuration import Configuration, changed, changes, choices, flat
from dstrain.plan.estimate import USABLE_GPU_RATIO, assess
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.search.evaluator import Evaluator, Key
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import EQUAL_RATIO, by_time
from dstrain.plan.search.search_space import SHORTEST, Candidate, with_batch
from dstrain.plan.speed.step_time import speed
from dstrain.units import MIB

NUM_FIXES = 3
"""Changes that are proposed."""

_ONLY_STATES = (Phase.LOAD, Phase.SAVE)
"""Phases in which there is no micro-batch."""
_FOLLOWING = frozenset({"grad_ckpt_every_n_layers"})
"""A choice that is a part of another one and does not count as a lever of its own."""
_MADE_UP = frozenset({"grad_accum", "offload_ratio"})
"""Choices that follow from others: from the micro-batch and the offload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The shortage, as measured and against the plan, in bytes of PyTorch's allocator."""

    phase: Phase
    limit_bytes: int
    """The most that the allocator could hold."""
    needed_bytes: int
    """The least that it would have held after the allocation that failed."""
    predicted_bytes: int
    """The allocator's bytes by the plan."""

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


def shortage(workload: Workload, estimate: Estimate, phase: Phase, measured: Allocator) -> Shortage:
    """Returns the shortage; the measured need is a lower bound."""
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
    """Returns the workload on a GPU that the plan can trust: all that PyTorch could hold, less the excess over it.

    The excess counts in full, however little a configuration needs: often the plan leaves out the same bytes for all.
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
    of them all that another one does. If no speed is known, those with the fewest levers come first. If fewer than
    three are found, a shorter sequence is the last, which does not keep the tokens of a step.
    """
    current = estimate.configuration
    less = smaller(workload, current, short)
    evaluator = Evaluator(less, USABLE_GPU_RATIO)
    space = {candidate: levers(current, candidate) for candidate in _space(less, current, short.phase, stages)}
    knows_speed = speed(workload, current) is not None
    first = _fastest(evaluator, space) if knows_speed else None
    found = {} if first is None else {first: space[first]}
    # with few levers first: a person who changes one line understands what it costs
    for count in range(1, max(map(len, space.values()), default=0) + 1):
        few = {candidate: used for candidate, used in space.items() if len(used - _FOLLOWING) == count}
        while len(found) < NUM_FIXES:
            few = {key: used for key, used in few.items() if not any(other <= used for other in found.values())}
            further = _fastest(evaluator, few)
            if further is None:
                break
            found[further] = space[further]
    # states do not shrink with the sequence
    if len(found) < NUM_FIXES and short.phase not in _ONLY_STATES:
        found |= {candidate: levers(current, candidate) for candidate in _shorter(evaluator, current)}
    ordered = list(found)
    if knows_speed:
        ordered.sort(key=lambda candidate: ("seq_len" in found[candidate], evaluator.time(candidate)))
    return tuple(_fix(workload, current, evaluator.verify(candidate), found[candidate]) for candidate in ordered)


def levers(current: Configuration, candidate: Candidate) -> frozenset[str]:
    """Returns the names of the choices that a candidate makes otherwise."""
    before, after = flat(current), flat(with_batch(candidate.way, candidate.micro_batch, candidate.grad_accum))
    return frozenset(name for name in before.keys() - _MADE_UP if before[name] != after[name])


def evaluated_at_once(short: Shortage, estimate: Estimate, eval_micro_batch: int) -> int | None:
    """Returns the largest smaller micro-batch of an evaluation that fits by what was measured; None if one is too many.

    The memory of an evaluation beside the model states grows with its micro-batch.
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
    """Yields the current way and those that keep less, without other micro-batches; NVMe needs a folder that only the
    user knows."""
    higher = [stage for stage in _less(current, "zero_stage") if stage in stages]
    larger = [offload for offload in _less(current, "offload") if offload is not Offload.NVME]
    for staged in (current, *changes(current, "zero_stage", higher)):
        for offloaded in (staged, *changes(staged, "offload", larger)):
            if phase in _ONLY_STATES:
                yield offloaded
                continue
            for recomputed in _recomputations(offloaded, in_ram=not workload.cluster.gpu.is_cpu):
                yield recomputed
                yield from changes(recomputed, "loss", _less(current, "loss"))


def _less(current: Configuration, name: str) -> tuple[Any, ...]:
    """Returns the values of a choice that need less memory than the current one."""
    choice = choices()[name]
    return choice.values[choice.values.index(choice.of(current)) + 1 :]


def _recomputations(current: Configuration, *, in_ram: bool) -> Iterator[Configuration]:
    """Yields the current choice, and those that keep less: more layers, then tiled MLPs and inputs in RAM."""
    yield current
    chosen = current.checkpointing
    for period in choices()["grad_ckpt_every_n_layers"].values:
        if not chosen.enabled or period < chosen.every_n_layers:
            yield changed(current, grad_ckpt=True, grad_ckpt_every_n_layers=period)
    whole = changed(current, grad_ckpt=True, grad_ckpt_every_n_layers=1)
    for offload in sorted({chosen.offload, chosen.offload or in_ram}):
        for tiled in sorted({chosen.tiled_mlp, True}):
            if (offload, tiled) != (chosen.offload, chosen.tiled_mlp):
                yield changed(whole, activation_offload=offload, tiled_mlp=tiled)


def _fastest(evaluator: Evaluator, space: Mapping[Candidate, frozenset[str]]) -> Candidate | None:
    """Returns the fastest candidate that fits, of equally fast ones that with the fewest levers; None if none fits."""
    best, best_key = None, None
    for candidate in by_time(evaluator, space):
        key = evaluator.time(candidate)
        if best_key is not None and not _is_equal(key, best_key):
            break
        if best is not None and len(space[candidate]) >= len(space[best]):
            continue
        if evaluator.seems_to_fit(candidate) and _fits(evaluator, candidate):
            best, best_key = candidate, best_key or key
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


def _shorter(evaluator: Evaluator, current: Configuration) -> Iterator[Candidate]:
    """Yields the configuration with the longest sequence of half the length, a quarter … that fits."""
    seq_len = current.batch.seq_len // 2
    while seq_len >= SHORTEST:
        way = replace(current, batch=replace(current.batch, seq_len=seq_len))
        candidate = _Variation(way, current.batch.micro_batch, current.step.grad_accum, None, way.zero.pin_memory)
        if _fits(evaluator, candidate):
            yield candidate
            return
        seq_len //= 2


def _fix(workload: Workload, before: Configuration, estimate: Estimate, changed: frozenset[str]) -> Fix:
    """Returns a change with its price; a step that ran out of memory is priced without the allocator's retries."""
    known, ratio = speed(workload, before), None
    if estimate.speed is not None and known is not None:
        ratio = estimate.speed.step_s / known.step_s - 1
    return Fix(estimate=estimate, levers=changed, step_ratio=ratio)
