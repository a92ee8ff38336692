"""Searches all strategies: times what may fit by a bound, and verifies from the fastest on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

from dstrain.facts.workload import Workload
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.request import Request
from dstrain.plan.search.evaluator import Evaluator, Key, usable_ratio
from dstrain.plan.search.search_space import TIGHT, Candidate, in_ram_too, mechanisms, strategy_key

EQUAL_RATIO = 0.02
"""Times that differ by less are called equal."""
TIE_RATIO = 0.10
"""Plans whose times differ by less count as equally fast: the simpler one comes first. Source: the throughputs of two
published runs of one model on as many GPUs: three of four ratios are predicted within that (`benchmarks/predict.py`).
"""
MOST_TIE_RATIO = 0.15
"""A gain of more is worth a mechanism more, though the prediction of the difference may be off by as much."""
DEFAULT_TOP = 3
"""Number of plans shown by default."""
MOST_MISSES = 6
"""Candidates that may turn out not to fit before no more alternatives to the best plan are looked for."""
LEAST_TRIED = 64
"""Candidates of least memory that are estimated before none is expected to fit."""
LEAST_MISSES = 2
"""Candidates of least memory that may turn out not to fit before none is expected to."""

Shortage = tuple[bool, int]
"""Whether the GPU could not hold a candidate; and the bytes that it needs there or, if it could, in host RAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The result of a search."""

    plans: tuple[Estimate, ...]
    """The best strategies, each with its best batch, best first; if nothing fits, the nearest ones."""
    rungs: tuple[int | None, ...]
    """The buffer rung of each plan (`search_space.sizes`)."""
    fits: bool
    """Whether the plans fit."""
    fastest: Estimate
    """The fastest of them: the first, or one that uses more mechanisms for a gain that may be an error."""
    difference_error_ratio: float
    """How far the gain of `fastest` over the first may be off, over the time of `fastest`."""
    num_estimated: int
    """Configurations that were estimated."""
    num_excluded: int
    """Configurations excluded by a bound; together with the estimated ones, the whole space."""
    evaluator: Evaluator
    candidates: tuple[Candidate, ...]
    """The whole space."""


def search(workload: Workload, request: Request, *, top: int = DEFAULT_TOP) -> Ranking:
    """Returns the `top` best plans that fit or, if none does, the nearest."""
    evaluator = Evaluator(workload, usable_ratio(request))
    candidates: list[Candidate] = []
    best: list[Candidate] = []
    fastest: Candidate | None = None
    for asked in (request, *in_ram_too(workload, request)):
        # inputs in RAM are for a plan that offloads states, or for want of any
        if fastest is not None and not any(each.way.zero.is_offloaded for each in (best[0], fastest)):
            break
        candidates += evaluator.space(asked)
        best, fastest = _best(evaluator, candidates, top)
    fits = fastest is not None
    if fastest is None:
        best = nearest(evaluator, candidates, max(top, DEFAULT_TOP))[:top]
        fastest = best[0]
    strategy = strategy_key(fastest.way)
    best[1:] = [fastest if strategy_key(each.way) == strategy else each for each in best[1:]]
    seconds = evaluator.time(fastest)
    knows_speed = len(seconds) == 1
    return Ranking(
        fastest=evaluator.estimate(fastest),
        difference_error_ratio=evaluator.difference_error_s(fastest, best[0]) / seconds[0] if knows_speed else 0.0,
        plans=tuple(evaluator.estimate(candidate) for candidate in best),
        rungs=tuple(candidate.rung for candidate in best),
        fits=fits,
        num_estimated=len(evaluator.estimates),
        num_excluded=len(candidates) - len(evaluator.estimates),
        evaluator=evaluator,
        candidates=tuple(candidates),
    )


def by_time(evaluator: Evaluator, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates that may fit, the fastest first."""
    return sorted(filter(evaluator.may_fit, candidates), key=evaluator.time)


def _best(evaluator: Evaluator, candidates: list[Candidate], top: int) -> tuple[list[Candidate], Candidate | None]:
    """Returns the best of candidates that fit, one per strategy, and the fastest of all.

    Of those that the prediction cannot tell from the fastest (`_is_tie`) the simplest comes first, unless another saves
    both time and memory (`_saving_both`); then those of the fastest left, until MOST_MISSES turn out not to fit.
    """
    waiting = [_tied(candidate, evaluator.time(candidate)) for candidate in by_time(evaluator, candidates)]
    ranked: dict[tuple[object, ...], Candidate] = {}
    passed: set[tuple[object, ...]] = set()
    fastest: Candidate | None = None
    is_alone, misses = evaluator.workload.cluster.num_gpus == 1, 0

    def fits(tied: _Tied) -> bool:
        nonlocal misses
        # alternatives to the best are not worth a replay of each that may fit
        if ranked and (misses >= MOST_MISSES or not evaluator.seems_to_fit(tied.candidate)):
            return False
        is_fitting = evaluator.fits(tied.candidate)
        misses += bool(ranked) and not is_fitting
        return is_fitting

    while len(ranked) < top:
        while waiting and (waiting[0].strategy in ranked.keys() | passed or not fits(waiting[0])):
            waiting.pop(0)
        if not waiting:
            break
        fastest = fastest or waiting[0].candidate
        for tie in _as_fast_as(evaluator, waiting[0], waiting):
            if len(ranked) == top:
                break
            # the estimate is taken as it is: a plan that only its error lets fit would lead to larger ones
            if tie.strategy in ranked.keys() | passed or not evaluator.seems_to_fit(tie.candidate):
                continue
            if not fits(best := tie if ranked else _saving_both(evaluator, tie, waiting)):
                continue
            if ranked and is_alone and any(_brings_nothing(evaluator, tie, other) and fits(other) for other in waiting):
                passed.add(tie.strategy)
                continue
            ranked[best.strategy] = best.candidate
    return list(ranked.values()), fastest


def _as_fast_as(evaluator: Evaluator, first: _Tied, waiting: list[_Tied]) -> list[_Tied]:
    """Returns the candidates that the prediction cannot tell from the first, the simplest first."""
    near = takewhile(lambda tied: _may_tie(tied.key, first.key), waiting)
    return sorted((other for other in near if _is_tie(evaluator, first, other)), key=_simplicity)


def _saving_both(evaluator: Evaluator, slow: _Tied, others: list[_Tied]) -> _Tied:
    """Returns the simplest plan that needs less time and less memory than one, or that has the same advantage over
    that; the plan itself if there is none.

    Simplicity may cost time that the prediction cannot tell, or memory, but not both.
    """
    for other in sorted(others, key=_simplicity):
        is_faster = len(slow.key) == 1 and other.key[0] * (1 + EQUAL_RATIO) < slow.key[0]
        # what fits by a quick estimate is compared by the exact one, too
        is_better = is_faster and _is_smaller(evaluator, other.candidate, slow.candidate)
        if is_better and evaluator.fits(other.candidate) and _is_smaller(evaluator, other.candidate, slow.candidate):
            return _saving_both(evaluator, other, others)
    return slow


def _is_smaller(evaluator: Evaluator, one: Candidate, other: Candidate) -> bool:
    """Returns whether a plan leaves more of the GPU than another, by EQUAL_RATIO of its memory, and no less of the RAM:
    bytes that are offloaded are not saved."""
    if evaluator.host_bytes(one) > evaluator.host_bytes(other):
        return False
    allowed = evaluator.live_bytes(other) - EQUAL_RATIO * evaluator.workload.cluster.gpu.memory_bytes
    least = evaluator.bound(one).device_bytes(one.micro_batch, one.grad_accum)
    return least < allowed and evaluator.live_bytes(one) < allowed


def _brings_nothing(evaluator: Evaluator, tie: _Tied, other: _Tied) -> bool:
    """Returns whether a plan on one GPU, which shares nothing, is a simpler one with more mechanisms: no faster and no
    smaller, with the same micro-batch and checkpointing."""
    one, simple = tie.candidate, other.candidate
    is_more = other.complexity < tie.complexity and other.key <= tie.key
    is_alike = one.micro_batch == simple.micro_batch and one.way.checkpointing == simple.way.checkpointing
    return is_more and is_alike and not _is_smaller(evaluator, one, simple)


class _Tied(NamedTuple):
    """A candidate that is as fast as others; ties are ordered by these fields."""

    complexity: int
    is_tight: bool
    padded_rows: int
    """Rows of a micro-batch that are padded to the longest of them; the times leave padding out."""
    key: Key
    strategy: tuple[object, ...]
    """Identity of the candidate's strategy (`strategy_key`)."""
    candidate: Candidate


def _tied(candidate: Candidate, key: Key) -> _Tied:
    rows = 1 if candidate.way.batch.packing else candidate.micro_batch
    complexity = mechanisms(candidate.way) + (candidate.way.zero.is_offloaded and not candidate.pin_memory)
    return _Tied(complexity, candidate.rung == TIGHT, rows, key, strategy_key(candidate.way), candidate)


def _may_tie(key: Key, first: Key) -> bool:
    return key == first if len(key) > 1 else key[0] <= first[0] * (1 + MOST_TIE_RATIO)


def _is_tie(evaluator: Evaluator, first: _Tied, other: _Tied) -> bool:
    """Returns whether the first is faster by less than the prediction of the difference may be off."""
    if len(first.key) > 1:
        return first.key == other.key
    slower_s = other.key[0] - first.key[0]
    if slower_s <= TIE_RATIO * first.key[0]:
        return True
    return slower_s <= min(
        MOST_TIE_RATIO * first.key[0], evaluator.difference_error_s(first.candidate, other.candidate)
    )


def _simplicity(tied: _Tied) -> tuple[object, ...]:
    return tied[:4]


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
    # of candidates whose least shortage is equal, the one that is lower without loading comes first
    frugal.sort(key=lambda candidate: _bound(evaluator, candidate, is_loaded=True))
    ordered = sorted(
        (_least_shortage(evaluator, candidate), place, candidate) for place, candidate in enumerate(frugal)
    )
    # a verified shortage is larger than the estimate, so that another candidate may now be nearer
    for _ in range(MOST_MISSES):
        found = _seemingly_nearest(evaluator, ordered, top)
        if evaluator.exact.issuperset(found):
            break
        for candidate in found:
            evaluator.verify(candidate)
    return _seemingly_nearest(evaluator, [entry for entry in ordered if entry[2] in evaluator.exact], top)


def least_plan(workload: Workload, request: Request) -> Estimate | None:
    """Returns the plan of the smallest bound that fits; None if none is found.

    Only the first LEAST_TRIED are estimated, and LEAST_MISSES of those that seem to fit verified: what needs more
    memory than these is not expected to fit.
    """
    evaluator = Evaluator(workload, usable_ratio(request))
    candidates = [each for asked in (request, *in_ram_too(workload, request)) for each in evaluator.space(asked)]
    possible = [each for each in candidates if each.rung in (TIGHT, None) and evaluator.may_fit(each)]
    possible.sort(key=lambda each: evaluator.bound(each).device_bytes(each.micro_batch, each.grad_accum))
    has_room = (each for each in possible if evaluator.has_host_room(each))
    seeming = (each for each in islice(has_room, LEAST_TRIED) if evaluator.seems_to_fit(each))
    fitting = (each for each in islice(seeming, LEAST_MISSES) if evaluator.fits(each))
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
        entry, key = (_shortage(evaluator, candidate), place, candidate), strategy_key(candidate.way)
        by_strategy[key] = min(entry, by_strategy.get(key, entry))
    return [candidate for _, _, candidate in sorted(by_strategy.values())][:top]


def _shortage(evaluator: Evaluator, candidate: Candidate) -> Shortage:
    """Returns how far a candidate is from fitting: what the GPU could hold is nearer than what it could not."""
    fits, needs = evaluator.seems_to_fit_gpu(candidate), evaluator.estimate(candidate).memory
    return not fits, needs.host_bytes_per_node if fits else needs.needed_bytes_per_gpu


def _bound(evaluator: Evaluator, candidate: Candidate, *, is_loaded: bool = False) -> Shortage:
    """Returns a lower bound of `_shortage`; of one that `is_loaded`, which leaves out what loading takes."""
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
