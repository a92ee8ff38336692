"""The configurations that come nearest to fitting where none fits."""

from __future__ import annotations

from itertools import islice

from dstrain.plan.estimate_records import Estimate
from dstrain.plan.search.buffer_sizes import TIGHT
from dstrain.plan.search.evaluator import MOST_MISSES, Evaluator, Shortage
from dstrain.plan.search.search_space import Candidate, strategy_key

LEAST_MISSES = 2
"""Candidates of least memory that may turn out not to fit before none is expected to."""

_Entry = tuple[Shortage, int, Candidate]
"""A candidate, how far it is from fitting, and its place: of equals, the first comes nearest."""


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
    frugal.sort(key=lambda candidate: _bound(evaluator, candidate, is_loaded=True))
    ordered = sorted(
        (_least_shortage(evaluator, candidate), place, candidate) for place, candidate in enumerate(frugal)
    )
    for _ in range(MOST_MISSES):
        found = _seemingly_nearest(evaluator, ordered, top)
        if evaluator.exact.issuperset(found):
            break
        for candidate in found:
            evaluator.verify(candidate)
    return _seemingly_nearest(evaluator, [entry for entry in ordered if entry[2] in evaluator.exact], top)


def least(evaluator: Evaluator, candidates: list[Candidate]) -> Estimate | None:
    """Returns the candidate of the smallest bound that fits, as an exact estimate; None if none is found.

    Only the first LEAST_MISSES that seem to fit are verified: what needs more memory than these is not expected to fit.
    """
    possible = [each for each in candidates if each.rung in (TIGHT, None) and evaluator.may_fit(each)]
    possible.sort(key=lambda each: evaluator.bound(each).device_bytes(each.micro_batch, each.grad_accum))
    seeming = (each for each in possible if evaluator.seems_to_fit(each, is_sure=True))
    fitting = (each for each in islice(seeming, LEAST_MISSES) if evaluator.fits(each, in_full=False))
    return next(map(evaluator.estimate, fitting), None)


def _seemingly_nearest(evaluator: Evaluator, ordered: list[_Entry], top: int) -> list[Candidate]:
    """Returns the nearest of candidates in the order of their bounds: one of each strategy, as far as is known.

    Those that the GPU could hold come before those that it could not; then by bytes. A bound above these bytes ends the
    search: nothing that is left comes nearer.
    """
    by_strategy: dict[tuple[object, ...], _Entry] = {}
    for least, place, candidate in ordered:
        known = sorted(shortage for shortage, _, _ in by_strategy.values())
        if len(known) >= top and known[top - 1] <= least:
            break
        entry, key = (evaluator.shortage(candidate), place, candidate), strategy_key(candidate.way)
        by_strategy[key] = min(entry, by_strategy.get(key, entry))
    return [candidate for _, _, candidate in sorted(by_strategy.values())][:top]


def _bound(evaluator: Evaluator, candidate: Candidate, *, is_loaded: bool = False) -> Shortage:
    """Returns a lower bound of `Evaluator.shortage`; of one that `is_loaded`, which leaves out what loading takes."""
    least, gpu_bytes = evaluator.bound(candidate), evaluator.workload.cluster.gpu.memory_bytes
    device = least.device_bytes(candidate.micro_batch, candidate.grad_accum)
    if not is_loaded and least.load_bytes > gpu_bytes:
        device = max(device, least.load_bytes)
    fits_gpu = device <= evaluator.usable_ratio * gpu_bytes
    return not fits_gpu, least.host_bytes if fits_gpu else device


def _least_shortage(evaluator: Evaluator, candidate: Candidate) -> Shortage:
    """Returns the same with exact bytes of the host, which are known without an estimate."""
    is_too_large, least = _bound(evaluator, candidate)
    return is_too_large, least if is_too_large else evaluator.host_bytes(candidate)
