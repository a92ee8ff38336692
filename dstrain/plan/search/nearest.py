"""The configurations that come nearest to fitting where none fits."""

from __future__ import annotations

from dstrain.plan.search.buffer_sizes import TIGHT
from dstrain.plan.search.evaluator import MOST_MISSES, Evaluator
from dstrain.plan.search.search_space import Candidate, strategy_key


def nearest(evaluator: Evaluator, candidates: list[Candidate], top: int) -> list[Candidate]:
    """Returns the ways that come nearest to fitting, each with its smallest micro-batch and buffers.

    What seems nearest is verified, and what comes nearest after that, up to MOST_MISSES times.
    """
    smallest: dict[tuple[object, ...], int] = {}
    for candidate in candidates:
        strategy = strategy_key(candidate.way)
        smallest[strategy] = min(candidate.micro_batch, smallest.get(strategy, candidate.micro_batch))
    frugal = [
        candidate
        for candidate in candidates
        if candidate.rung in (TIGHT, None) and candidate.micro_batch == smallest[strategy_key(candidate.way)]
    ]
    frugal.sort(key=lambda candidate: _least_shortage(evaluator, candidate))
    for _ in range(MOST_MISSES):
        found = _seemingly_nearest(evaluator, frugal, top)
        if evaluator.exact.issuperset(found):
            break
        for candidate in found:
            evaluator.verify(candidate)
    return _seemingly_nearest(evaluator, [candidate for candidate in frugal if candidate in evaluator.exact], top)


def _seemingly_nearest(evaluator: Evaluator, candidates: list[Candidate], top: int) -> list[Candidate]:
    """Returns the nearest of candidates in the order of their bounds: one of each strategy, as far as is known.

    Those that the GPU could hold come before those that it could not; then by bytes. A bound above these bytes ends the
    search: nothing that is left comes nearer.
    """
    by_strategy: dict[tuple[object, ...], tuple[tuple[bool, int], Candidate]] = {}
    for candidate in candidates:
        known = sorted(shortage for shortage, _ in by_strategy.values())
        if len(known) >= top and known[top - 1] <= _least_shortage(evaluator, candidate):
            break
        shortage = evaluator.shortage(candidate)
        key = strategy_key(candidate.way)
        if key not in by_strategy or shortage < by_strategy[key][0]:
            by_strategy[key] = shortage, candidate
    return [candidate for _, candidate in sorted(by_strategy.values(), key=lambda entry: entry[0])][:top]


def _least_shortage(evaluator: Evaluator, candidate: Candidate) -> tuple[bool, int]:
    """Returns a lower bound of `Evaluator.shortage`."""
    least = evaluator.bound(candidate)
    device = least.device_bytes(candidate.micro_batch)
    fits_gpu = device <= evaluator.usable_ratio * evaluator.workload.cluster.gpu.memory_bytes
    return not fits_gpu, least.host_bytes if fits_gpu else device
