"""Searches all strategies, the fastest first; each is estimated or ruled out by a bound."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import NamedTuple

from dstrain.facts.workload import Workload
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.request import Request
from dstrain.plan.search.buffer_sizes import TIGHT
from dstrain.plan.search.evaluator import MOST_MISSES, PROPOSAL_MISSES, Evaluator, Key, usable_ratio
from dstrain.plan.search.nearest import least, nearest
from dstrain.plan.search.search_space import Candidate, in_ram_too, mechanisms, strategy_key
from dstrain.plan.search.slowdown_order import lost_speed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The result of a search."""

    plans: tuple[Estimate, ...]
    """The best strategies, each with its best batch, best first; if nothing fits, the nearest ones."""
    rungs: tuple[int | None, ...]
    """The buffer rung of each plan (`buffer_sizes.sizes`)."""
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


def search(workload: Workload, request: Request, *, top: int = DEFAULT_TOP, exhaustive: bool = False) -> Ranking:
    """Returns the `top` best plans that fit or, if none does, the nearest.

    Best first by time: a candidate enters with a bound below its time, comes back with its time, and is estimated only
    when nothing faster is left. What the memory bound rules out never enters; the search ends when enough is known.
    `exhaustive` estimates everything instead, and must find the same.
    """
    evaluator = Evaluator(workload, usable_ratio(request))
    candidates, best, fastest = _best(evaluator, request, top, exhaustive=exhaustive)
    fits = bool(best)
    if not fits:
        best = nearest(evaluator, candidates, max(top, DEFAULT_TOP))[:top]
    fastest = fastest or best[0]
    strategy = strategy_key(fastest.way)
    best[1:] = [fastest if strategy_key(each.way) == strategy else each for each in best[1:]]
    key = evaluator.time(fastest)
    return Ranking(
        fastest=evaluator.estimate(fastest),
        difference_error_ratio=evaluator.difference_error_s(fastest, best[0]) / key[0] if key else 0.0,
        plans=tuple(evaluator.estimate(candidate) for candidate in best),
        rungs=tuple(candidate.rung for candidate in best),
        fits=fits,
        num_estimated=len(evaluator.estimates),
        num_excluded=len(candidates) - len(evaluator.estimates),
        evaluator=evaluator,
        candidates=tuple(candidates),
    )


def _best(
    evaluator: Evaluator,
    request: Request,
    top: int,
    *,
    exhaustive: bool = False,
    proposed_if: Callable[[Candidate], bool] | None = None,
) -> tuple[list[Candidate], list[Candidate], Candidate | None]:
    """Returns the candidates, the best of them, and the fastest; with layers' inputs in RAM if the best needs room."""
    candidates: list[Candidate] = []
    best: list[Candidate] = []
    fastest = None
    for asked in (request, *in_ram_too(evaluator.workload, request)):
        if best and fastest and not any(each.way.zero.is_offloaded for each in (best[0], fastest)):
            break
        candidates += evaluator.space(asked)
        possible = candidates if exhaustive else [candidate for candidate in candidates if evaluator.may_fit(candidate)]
        if exhaustive:
            for candidate in candidates:
                evaluator.estimate(candidate)
        best, fastest = _verified(evaluator, possible, top, proposed_if)
    return candidates, best, fastest


def _verified(
    evaluator: Evaluator, candidates: list[Candidate], top: int, proposed_if: Callable[[Candidate], bool] | None = None
) -> tuple[list[Candidate], Candidate | None]:
    """Returns the best candidates, and the fastest, whose exact estimates fit too.

    The best and the fastest are looked for among all that may fit, until they are verified. Alternatives to the best,
    and a proposal for other machines or options, are looked for among those that fit by their quick estimates, until
    MOST_MISSES or PROPOSAL_MISSES of these turn out not to.
    """
    ordered = _Remembered(by_time(evaluator, candidates))
    for _ in range(PROPOSAL_MISSES) if proposed_if else count():
        ranked, fastest = _ranked(evaluator, ordered, 1, proposed_if or evaluator.seems_to_fit)
        if fastest is None:
            return [], None
        if all(evaluator.fits(candidate, in_full=not proposed_if) for candidate in (fastest, ranked[0])):
            break
    else:
        return [], None
    for _ in range(MOST_MISSES if top > 1 else 0):
        ranked, _ = _ranked(evaluator, ordered, top, partial(evaluator.seems_to_fit, is_sure=True))
        if all(evaluator.fits(candidate) for candidate in ranked):
            break
    verified = [candidate for candidate in ranked if candidate in evaluator.exact | evaluator.fitting]
    return [candidate for candidate in verified if evaluator.estimate(candidate).fits], fastest


class _Remembered:
    """What an iterator yields, for several passes."""

    def __init__(self, rest: Iterator[tuple[Key, Candidate | None]]) -> None:
        self._rest = rest
        self._seen: list[tuple[Key, Candidate | None]] = []

    def __iter__(self) -> Iterator[tuple[Key, Candidate | None]]:
        yield from self._seen
        for entry in self._rest:
            self._seen.append(entry)
            yield entry


def fastest(workload: Workload, request: Request) -> Estimate | None:
    """Returns the best plan that fits by its quick estimate too, or the least one if few seem to; None if none fits.

    What fits with all that the allocator may hold besides live bytes comes first: it needs no replay.
    """
    evaluator = Evaluator(workload, usable_ratio(request))
    smallest = _least(evaluator, request)
    if smallest is None:
        return None
    evaluator = evaluator.afresh()
    for fits in (evaluator.seems_to_hold_all, partial(evaluator.seems_to_fit, is_sure=True)):
        _, best, _ = _best(evaluator, request, 1, proposed_if=fits)
        if best:
            return evaluator.estimate(best[0])
        evaluator.forget_failures()
    return smallest


def something_seems_to_fit(workload: Workload, request: Request) -> bool:
    """Returns whether there is a plan that may fit, as far as quick estimates tell (`Evaluator.seems_to_fit`)."""
    evaluator = Evaluator(workload, usable_ratio(request))
    return any(evaluator.may_fit(each) and evaluator.seems_to_fit(each) for each in _whole_space(evaluator, request))


def least_plan(workload: Workload, request: Request) -> Estimate | None:
    """Returns the plan of least memory that fits, as far as few exact estimates tell (`nearest.LEAST_MISSES`)."""
    return _least(Evaluator(workload, usable_ratio(request)), request)


def _least(evaluator: Evaluator, request: Request) -> Estimate | None:
    return least(evaluator, _whole_space(evaluator, request))


def _whole_space(evaluator: Evaluator, request: Request) -> list[Candidate]:
    requests = (request, *in_ram_too(evaluator.workload, request))
    return [candidate for asked in requests for candidate in evaluator.space(asked)]


def _ranked(
    evaluator: Evaluator, ordered: _Remembered, top: int, seems_to_fit: Callable[[Candidate], bool]
) -> tuple[list[Candidate], Candidate | None]:
    """Returns the best of candidates in the order of time that seem to fit, one per strategy, and the fastest of all.

    Those that are slower than the fastest by no more than the prediction is worth (`_is_tie`) are as good as it, and
    the simplest of them comes first, unless it needs both more time and more memory than another (`_saving_both`); then
    those of the fastest that is left. Times tell what is as good, so that of these only the simplest are estimated.
    """
    ranked: dict[tuple[object, ...], Candidate] = {}
    alike: set[tuple[object, ...]] = set()
    fastest: Candidate | None = None
    entries = iter(ordered)
    waiting: list[_Tied] = []
    while len(ranked) < top:
        first = _first_that_fits(waiting, entries, ranked.keys() | alike, seems_to_fit)
        if first is None:
            break
        fastest = fastest or first.candidate
        for key, candidate in entries:
            waiting += [] if candidate is None else [_tied(candidate, key)]
            if not _may_tie(key, first.key):
                break
        ties = (other for other in waiting if _is_tie(evaluator, first, other))
        for tie in sorted(ties, key=lambda tie: tie[:4]):
            if len(ranked) == top:
                break
            if tie.strategy in ranked.keys() | alike or not seems_to_fit(tie.candidate):
                continue
            better = (other.candidate for other in waiting if _is_better(other, tie))
            if any(map(seems_to_fit, better)):
                continue
            simpler = (other.candidate for other in waiting if ranked and _brings_nothing(evaluator, tie, other))
            if any(map(seems_to_fit, simpler)):
                alike.add(tie.strategy)
                continue
            best = tie if ranked else _saving_both(evaluator, tie, waiting, seems_to_fit)
            ranked[best.strategy] = best.candidate
    return list(ranked.values()), fastest


def _saving_both(
    evaluator: Evaluator, slow: _Tied, others: list[_Tied], seems_to_fit: Callable[[Candidate], bool]
) -> _Tied:
    """Returns the simplest plan that needs less time and less memory than one, or that has the same advantage over
    that; the plan itself if there is none.

    Simplicity may cost time that the prediction cannot tell, or memory, but not both.
    """
    for other in sorted(others, key=lambda tie: tie[:4]):
        is_faster = len(slow.key) == 1 and other.key[0] * (1 + EQUAL_RATIO) < slow.key[0]
        if is_faster and _is_smaller(evaluator, other.candidate, slow.candidate) and seems_to_fit(other.candidate):
            return _saving_both(evaluator, other, others, seems_to_fit)
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
    is_alone = evaluator.workload.cluster.num_gpus == 1
    is_more = is_alone and other.complexity < tie.complexity and other.key <= tie.key
    is_alike = one.micro_batch == simple.micro_batch and one.way.checkpointing == simple.way.checkpointing
    return is_more and is_alike and not _is_smaller(evaluator, one, simple)


def _first_that_fits(
    waiting: list[_Tied],
    entries: Iterator[tuple[Key, Candidate | None]],
    ranked: Container[tuple[object, ...]],
    seems_to_fit: Callable[[Candidate], bool],
) -> _Tied | None:
    """Returns the fastest of a strategy that is not ranked, of those that wait and then of the others; drops from
    those that wait what comes before it."""
    others = (_tied(candidate, key) for key, candidate in entries if candidate is not None)
    for number, tied in enumerate(chain(waiting, others)):
        if tied.strategy not in ranked and seems_to_fit(tied.candidate):
            waiting[: number + 1] = [tied]
            return tied
    return None


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
    return _Tied(_complexity(candidate), candidate.rung == TIGHT, rows, key, strategy_key(candidate.way), candidate)


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


def _is_better(one: _Tied, other: _Tied) -> bool:
    """Returns whether one of the same strategy is faster and no less simple."""
    return one.strategy == other.strategy and one.key < other.key and one[:3] <= other[:3]


def _complexity(candidate: Candidate) -> int:
    return mechanisms(candidate.way) + (candidate.way.zero.is_offloaded and not candidate.pin_memory)


def by_time(evaluator: Evaluator, candidates: list[Candidate]) -> Iterator[tuple[Key, Candidate | None]]:
    """Yields candidates with their times, the fastest first; and None with the least time of all that are left.

    A candidate waits with the bound of its time; when nothing has a lower one, its time is computed, and it waits
    again. If the speed of the GPU is unknown, the order of lost speed replaces times.
    """
    if not candidates:
        return
    if evaluator.time(candidates[0]) is None:
        keyed = [(lost_speed(evaluator.workload.cluster, candidate), candidate) for candidate in candidates]
        yield from sorted(keyed, key=lambda entry: entry[0])
        return
    waiting = [(evaluator.least_time(candidate), order, False) for order, candidate in enumerate(candidates)]
    heapq.heapify(waiting)
    while waiting:
        key, order, is_time = heapq.heappop(waiting)
        yield key, candidates[order] if is_time else None
        if not is_time:
            time = evaluator.time(candidates[order])
            assert time is not None, "a GPU's speed is known for every configuration or for none"
            heapq.heappush(waiting, (time, order, True))
