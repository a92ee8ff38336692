"""Makes the plan: surveys the best configurations, chooses the first, gives reasons, and plans questions near it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from dstrain.choices import Method, Offload, Precision
from dstrain.errors import InvalidConfig
from dstrain.facts.attention_kernels import runs_on
from dstrain.facts.cluster.cluster import Cluster, resized
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.limits import QWZ, cpu_limits_of
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate import assess, moved
from dstrain.plan.estimate_records import Estimate, Plan, Reason
from dstrain.plan.named_parts import require_targets
from dstrain.plan.request import Request
from dstrain.plan.search.alternatives import Neighbour, eight_bit_instead, faster_but_too_large, neighbours, unasked
from dstrain.plan.search.evaluator import estimated, usable_ratio
from dstrain.plan.search.infeasible import does_not_fit, ways_that_fit
from dstrain.plan.search.notes import learning_rate, notes
from dstrain.plan.search.reasons import compared, reasons
from dstrain.plan.search.search import DEFAULT_TOP, Ranking, search
from dstrain.plan.search.search_space import TIGHT, global_batch, least_offloaded, sized, sized_to_room, unsatisfied


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan with its reasons."""

    estimate: Estimate
    """The configuration, its memory and its speed."""
    reasons: tuple[Reason, ...]
    """Sentences with numbers; all proposals but the first are compared with the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The best plans, best first; if none fits, the nearest."""

    proposals: tuple[Proposal, ...]
    """The plans with their reasons."""
    fits: bool
    """Whether the first proposal fits."""
    rejected: tuple[Estimate, ...]
    """Estimates that would be faster than the first but do not fit, nearest to fitting first."""
    num_estimated: int
    """Configurations that were estimated."""
    num_excluded: int
    """Configurations excluded by a bound; together with the estimated ones, the whole space."""
    notes: tuple[str, ...]
    """Assumptions, and advice before training."""

    @property
    def first(self) -> Estimate:
        """The choice or, if nothing fits, the nearest estimate."""
        return self.proposals[0].estimate


def decide(workload: Workload, request: Request) -> Plan:
    """Returns the fastest plan that fits.

    Raises DoesNotFit with the nearest changes that would fit, and InvalidConfig if the request contradicts itself or
    the GPU.
    """
    surveyed = survey(workload, request)
    if not surveyed.fits:
        ways = ways_that_fit(
            workload, request, lambda _, changed, cluster: choice(replace(workload, cluster=cluster), changed)
        )
        raise does_not_fit(workload, request, surveyed.first, ways)
    return plan_of(surveyed, workload.cluster, request)


def plan_of(surveyed: Survey, cluster: Cluster, request: Request) -> Plan:
    """Returns the first proposal of a survey as a plan."""
    return Plan(
        chosen=surveyed.first,
        rejected=surveyed.rejected,
        num_estimated=surveyed.num_estimated,
        global_batch=global_batch(cluster, surveyed.first.configuration),
        learning_rate=learning_rate(request, global_batch(cluster, surveyed.first.configuration)),
        reasons=surveyed.proposals[0].reasons,
        notes=surveyed.notes,
    )


def survey(workload: Workload, request: Request, *, top: int = DEFAULT_TOP) -> Survey:
    """Returns the `top` best plans with reasons; raises InvalidConfig if the request contradicts itself."""
    check(workload, request)
    ranking = search(workload, request, top=top)
    first, rung, assessed = _first(workload, request, ranking)
    cluster = workload.cluster
    others = _alternatives(workload, request, first, ranking, assessed)
    why = reasons(
        workload,
        request,
        first,
        ranking=ranking,
        rung=rung,
        others=others,
        eight_bit=eight_bit_instead(workload, request, first),
        free=_free_choice(workload, request, first),
    )
    rest = [Proposal(estimate=estimate, reasons=compared(cluster, estimate, first)) for estimate in ranking.plans[1:]]
    return Survey(
        proposals=(Proposal(estimate=first, reasons=why), *rest),
        fits=first.fits,
        rejected=tuple(neighbour.estimate for neighbour in faster_but_too_large(cluster, first, others)),
        num_estimated=ranking.num_estimated,
        num_excluded=ranking.num_excluded,
        notes=notes(workload, request, first),
    )


def choice(workload: Workload, request: Request) -> Estimate:
    """Returns the first plan of a survey without reasons; if nothing fits, a quick estimate of the nearest."""
    check(workload, request)
    ranking = search(workload, request, top=1)
    if not ranking.fits and ranking.rungs[0] is not None:
        return ranking.plans[0]
    return _first(workload, request, ranking)[0]  # one configuration may fit with small buffers


def _alternatives(
    workload: Workload,
    request: Request,
    chosen: Estimate,
    ranking: Ranking,
    assessed: Callable[[Configuration], Estimate],
) -> list[Neighbour]:
    """Returns the alternatives to the choices of a plan that fits; quick estimates are off by as much as that of it."""
    if not chosen.fits:
        return []
    error = chosen.memory.device_bytes_per_gpu - assessed(chosen.configuration).memory.device_bytes_per_gpu
    return neighbours(
        workload,
        request,
        chosen,
        ranking=ranking,
        assess=lambda configuration: moved(assessed(configuration), error),
        verify=partial(assess, workload, usable_gpu_ratio=usable_ratio(request)),
    )


def _free_choice(workload: Workload, request: Request, chosen: Estimate) -> Estimate | None:
    """Returns the choice for the request without its choices that only change speed; None if the request makes no such
    choice, or if nothing fits."""
    opened = unasked(request, global_batch(workload.cluster, chosen.configuration)) if chosen.fits else None
    if opened is None:
        return None
    try:
        free = choice(workload, opened)
    except InvalidConfig:  # what is open has no way to keep the batch
        return None
    return free if free.fits else None


def _first(
    workload: Workload, request: Request, ranking: Ranking
) -> tuple[Estimate, int | None, Callable[[Configuration], Estimate]]:
    """Returns the first plan of a ranking in full, the rung of its buffers, and what estimates others like it."""
    ratio = usable_ratio(request)

    def assessed(configuration: Configuration) -> Estimate:
        return estimated(workload, configuration, usable_gpu_ratio=ratio)

    sketch, rung = _settled(workload.model, request, ranking, assess=assessed)
    first = assess(workload, sketch.configuration, usable_gpu_ratio=ratio)
    if sketch.fits and not first.fits:
        return ranking.plans[0], ranking.rungs[0], assessed
    return first, rung, assessed


def _settled(
    model: ModelFacts, request: Request, ranking: Ranking, *, assess: Callable[[Configuration], Estimate]
) -> tuple[Estimate, int | None]:
    """Returns the first of a ranking with its middle settings sized, and the rung of its buffers.

    Buffers grow into the memory left, and as little of a divided optimizer is offloaded as fits. One configuration that
    was asked for keeps its buffers, unless it fits only with small ones.
    """
    first, rung = ranking.plans[0], ranking.rungs[0]
    if rung is None:
        small = first if first.fits else assess(sized(model, first.configuration, TIGHT))
        return (first, None) if first.fits or not small.fits else (small, TIGHT)
    if not first.fits or request.is_one_configuration:
        return first, rung
    if request.offload_ratio is None:
        first = least_offloaded(first, assess=assess)
    return sized_to_room(model, first, rung, assess=assess)


def check(workload: Workload, request: Request) -> None:
    """Raises InvalidConfig for a request that the GPU or the model cannot satisfy."""
    model, cluster, gpu = workload.model, workload.cluster, workload.cluster.gpu
    if request.precision is Precision.BF16 and gpu.lacks_bf16:
        raise unsatisfied(request, "precision", f": {gpu.name} has no bf16", hint="Write --precision fp16.")
    asked = {
        "attn": request.attn,
        "precision": request.precision,
        "offload": request.offload,
        "liger": request.liger,
        QWZ: request.qwz,
        "activation_offload": request.activation_offload,
    }
    for limit in cpu_limits_of(asked) if gpu.is_cpu else ():
        if not limit.unless:
            raise InvalidConfig(f"{limit.asked}: {limit.why}", hint=f"Write {limit.answer}.")
    if request.attn is not None and not runs_on(gpu, request.attn):
        why = f" does not run on {gpu.name}"
        raise unsatisfied(request, "attn", why, hint="Write --attn auto, the best that runs there.")
    if request.method is not Method.FULL:
        require_targets(model, request.lora)
    if request.offload is Offload.NVME and cluster.nvme_path is None:
        why = " needs a folder on an NVMe drive"
        raise unsatisfied(request, "offload", why, hint="Add --nvme /path/on/nvme.")


FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Multiples of the GPUs and of the sequence length that were asked for; the first few that are possible count."""
NUM_CLUSTERS, NUM_SEQ_LENS = 4, 3
"""How many values GPUs and sequence length have: a point takes about a second of one core."""
MICRO_BATCHES = (1, 2, 4)
"""Beside the one that was asked for, and the planner's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Values whose combinations are planned: at most 4 × 3 × 5."""

    seq_len: tuple[int, ...]
    """Tokens of the longest sample."""
    micro_batch: tuple[int | None, ...]
    """Samples of one forward of one GPU; None: chosen by the planner."""
    clusters: tuple[Cluster, ...]
    """Machines with different numbers of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination, and the answer to it."""

    seq_len: int
    micro_batch: int | None
    cluster: Cluster
    answer: Estimate | InvalidConfig
    """The best plan that fits, else the nearest; or how the options contradict each other."""


def grid_axes(workload: Workload, request: Request, asked: Estimate, *, gpus_per_node: int | None) -> Axes:
    """Returns values around the question whose answer is `asked`: GPUs that fill nodes of `gpus_per_node` (None: of the
    same size, or as `--gpus` alone means them), and no more tokens than the model can read."""
    cluster, longest = workload.cluster, workload.model.max_position_embeddings
    seq_lens = _multiples(asked.configuration.batch.seq_len)
    clusters = []
    for gpus in _multiples(cluster.num_gpus):
        with suppress(InvalidConfig):
            is_same = gpus == cluster.num_gpus
            clusters.append(cluster if is_same else resized(cluster, gpus, gpus_per_node=gpus_per_node))
    return Axes(
        seq_len=tuple(tokens for tokens in seq_lens if tokens <= longest)[:NUM_SEQ_LENS],
        micro_batch=(None, *sorted({*MICRO_BATCHES, request.micro_batch or 1})),
        clusters=tuple(clusters[:NUM_CLUSTERS]),
    )


def grid_points(workload: Workload, request: Request, asked: Estimate, values: Axes) -> tuple[Point, ...]:
    """Returns every combination of the values with its answer, as to a question of its own, which for `asked` is known.

    What does not fit is a quick estimate.
    """
    question = (asked.configuration.batch.seq_len, request.micro_batch, workload.cluster)
    found = []
    for cluster, seq_len, micro_batch in product(values.clusters, values.seq_len, values.micro_batch):
        answer: Estimate | InvalidConfig = asked
        if (seq_len, micro_batch, cluster) != question:
            changed = replace(request, seq_len=seq_len, micro_batch=micro_batch)
            try:
                answer = choice(replace(workload, cluster=cluster), changed)
            except InvalidConfig as error:
                answer = error
        found.append(Point(seq_len=seq_len, micro_batch=micro_batch, cluster=cluster, answer=answer))
    return tuple(found)


def _multiples(count: int) -> list[int]:
    return [int(count * factor) for factor in FACTORS if (count * factor).is_integer()]
