"""Explains that no configuration fits: how far the nearest one is over, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from dstrain.choices import Method, Offload, Optimizer
from dstrain.errors import DoesNotFit, DstrainError, InvalidConfig
from dstrain.facts.cluster.cluster import DEFAULT_GPUS_PER_NODE, Cluster, Origin, resized
from dstrain.facts.workload import Workload
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.plan.request import SPEED, Request
from dstrain.plan.search.alternatives import gain_ratio
from dstrain.plan.search.search import EQUAL_RATIO, least_plan
from dstrain.plan.search.search_space import DEFAULT_SEQ_LEN, SHORTEST, option
from dstrain.units import GIB, format_bytes

NO_WAY = "No similar configuration was found that fits either."


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Other options with which a plan fits."""

    words: str
    """The options, as they are typed: `--gpus 32 without --global-batch 48`."""
    options: Mapping[str, Any]
    """Their values by name; None: left out."""
    estimate: Estimate
    """The plan that the command makes with them."""

    def __str__(self) -> str:
        return f"{self.words}: {label(self.estimate.configuration)}"


Judge = Callable[[Mapping[str, Any], Request, Cluster], Estimate]
"""Returns the plan of a command with other options, given their values by name, the request and the machines that they
make of this one. Raises DstrainError if the command refuses them."""


def does_not_fit(workload: Workload, request: Request, nearest: Estimate, ways: Sequence[Way]) -> DoesNotFit:
    """Returns the error of a search that found nothing: the closest configuration in numbers, and changes that fit."""
    model, cluster = workload.model, workload.cluster
    is_assumed = cluster.host_memory_origin is Origin.ASSUMED and not nearest.fits_host
    hint = "\n".join(["These options fit:", *(f"  {way}" for way in ways)]) if ways else NO_WAY
    title = label(nearest.configuration)
    the_way = f"{title} needs" if request.is_one_configuration else f"the closest configuration, {title}, needs"
    problem = f"{model.name} does not fit on {cluster.num_gpus} × {cluster.gpu.name}: {the_way} {nearest.shortage}"
    assumed = [ram_assumed(cluster)] if is_assumed else []
    assumed += [gpu_assumed(cluster)] if cluster.gpu_origin is Origin.ASSUMED else []
    return DoesNotFit("\n".join([problem, *assumed]), hint=hint)


def ram_assumed(cluster: Cluster) -> str:
    """Returns which RAM was assumed, and the option that sets it."""
    return f"assumed: {format_bytes(cluster.host_memory_bytes)} of RAM on each node; change it with --host-memory"


def gpu_guessed(cluster: Cluster) -> str:
    """Returns a note about a GPU outside the table."""
    gpu = cluster.gpu
    basis = f"planned as the nearest of its generation, {gpu.like}, scaled by its cores, clock and memory"
    return f"{gpu.name} is not in the table of GPUs: {basis if gpu.like else 'its speed is a guess'}"


def gpu_assumed(cluster: Cluster) -> str:
    """Returns which GPU was assumed, and the option that sets it."""
    gpu = cluster.gpu
    size = format_bytes(gpu.memory_bytes)
    return f"assumed: {gpu.name} ({size}), as none is here; name yours with --gpu"


def ways_that_fit(
    workload: Workload, request: Request, judge: Judge, *, hosts: Mapping[str, object] = MappingProxyType({})
) -> tuple[Way, ...]:
    """Returns changes that fit: more RAM than was assumed, a smaller micro-batch than the one asked for, one choice of
    the request less, more GPUs, an 8-bit optimizer, an adapter, a shorter sequence.

    Each seems to fit by a quick search, and is then judged as the command would judge it, so that it is legal too. If
    an adapter fits only with states in RAM, one of 4-bit weights is named too if it is faster. `hosts` are the options
    that name the machines, which more GPUs leave out.
    """
    found: dict[str, Way] = {}
    for change in _changes(workload, request, hosts):
        before = found.get(change.kind)
        if before is not None and not (change.kind == "method" and before.estimate.configuration.zero.is_offloaded):
            continue
        estimate = _judged(workload, change, judge)
        if estimate is None:
            continue
        gain = gain_ratio(change.cluster, estimate, before.estimate) if before is not None else None
        if before is None or (gain or 0) > EQUAL_RATIO:
            kind = change.kind if before is None else f"{change.kind} too"
            words = _words(request, change.options, hosts)
            found[kind] = Way(words=words, options=change.options, estimate=estimate)
    return tuple(found.values())


class _Change(NamedTuple):
    """Another question."""

    kind: str
    """Of each kind the first one that fits is named."""
    options: Mapping[str, Any]
    """The options that differ; None: left out."""
    request: Request
    cluster: Cluster


def _judged(workload: Workload, change: _Change, judge: Judge) -> Estimate | None:
    """Returns the plan of a changed command; None if it refuses the options, or nothing seems to fit or does."""
    try:
        if least_plan(replace(workload, cluster=change.cluster), change.request) is None:
            return None
        estimate = judge(change.options, change.request, change.cluster)
    except DstrainError:
        return None
    return estimate if estimate.fits else None


def _words(request: Request, options: Mapping[str, Any], hosts: Mapping[str, object]) -> str:
    """Returns options as they are typed: those that differ, then those that are left out."""
    typed = [f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None]
    if "host_memory" in options:
        typed = [f"--host-memory {options['host_memory'] // GIB}GiB"]
    left_out = [name for name, value in options.items() if value is None]
    less = [f"--{name} {hosts[name]}" if name in hosts else option(request, name) for name in left_out]
    return " ".join([*typed, *(["without", " and ".join(less)] if less else [])])


def _changes(workload: Workload, request: Request, hosts: Mapping[str, object]) -> Iterator[_Change]:
    """Yields kinds of change, each from the smallest on."""
    cluster = workload.cluster
    alone = replace(request, sp=request.sp or 1, tp=request.tp or 1)  # sequence parallelism needs less, and is slow
    if cluster.host_memory_origin is Origin.ASSUMED:
        least = 1 << (cluster.host_memory_bytes // GIB).bit_length()
        for changed, gib in product((alone, request), (least, 2 * least, 4 * least, 8 * least)):
            options: dict[str, Any] = {"host_memory": gib * GIB}
            yield _Change("host-memory", options, changed, replace(cluster, host_memory_bytes=gib * GIB))
    micro_batch = (request.micro_batch or 1) // 2
    while micro_batch:  # accumulation makes up for it
        options = {"micro_batch": micro_batch, **({} if request.grad_accum is None else {"grad_accum": None})}
        yield _Change("micro-batch", options, replace(request, **{"grad_accum": None, **options}), cluster)
        micro_batch //= 2
    for name in SPEED:
        is_open = Request.__dataclass_fields__[name].default is None and name not in ("micro_batch", "grad_accum")
        if is_open and getattr(request, name) is not None:
            options = {name: None}
            yield _Change(name, options, replace(request, **options), cluster)
    yield from _more_gpus(workload, request, alone, hosts)
    if request.optimizer is Optimizer.ADAMW and request.offload in (None, Offload.NONE):
        options = {"optimizer": Optimizer.ADAMW_8BIT}
        yield _Change("optimizer", options, replace(request, **options), cluster)
    others = {Method.FULL: (Method.LORA, Method.QLORA), Method.LORA: (Method.QLORA,), Method.QLORA: (Method.LORA,)}
    for method in others[request.method]:  # with 4-bit weights each GPU loads the whole model, whatever the stage
        yield _Change("method", {"method": method}, replace(request, method=method), cluster)
    seq_len = request.seq_len or min(DEFAULT_SEQ_LEN, workload.model.max_position_embeddings)
    if least_plan(workload, replace(request, seq_len=min(seq_len, SHORTEST))) is None:
        return
    while seq_len > SHORTEST:
        seq_len //= 2
        yield _Change("seq-len", {"seq_len": seq_len}, replace(request, seq_len=seq_len), cluster)


def _more_gpus(workload: Workload, request: Request, alone: Request, hosts: Mapping[str, object]) -> Iterator[_Change]:
    """Yields more GPUs, with the global batch if one was asked for, then without it."""
    more = [_larger(workload.cluster, factor, hosts) for factor in (2, 4, 8, 16)]
    batches = (None,) if request.global_batch is None else (request.global_batch, None)
    for global_batch, wish in product(batches, (alone, request)):
        changed = replace(wish, global_batch=global_batch)
        if not _something_fits(replace(workload, cluster=more[-1][0]), changed):
            continue
        for larger, options in more:
            options = options if global_batch == request.global_batch else {**options, "global_batch": None}
            yield _Change("gpus", options, changed, larger)


def _larger(cluster: Cluster, factor: int, hosts: Mapping[str, object]) -> tuple[Cluster, Mapping[str, Any]]:
    """Returns a cluster of several times the GPUs, and the options that name it; nodes stay as large as they are, if
    they have to be full or are named."""
    gpus, per_node = cluster.num_gpus * factor, cluster.gpus_per_node
    options: dict[str, Any] = {"gpus": gpus, **dict.fromkeys(hosts)}
    try:
        if not hosts or per_node == DEFAULT_GPUS_PER_NODE:
            return resized(cluster, gpus), options
    except InvalidConfig:
        pass
    return replace(cluster, num_nodes=cluster.num_nodes * factor), {**options, "gpus_per_node": per_node}


def _something_fits(workload: Workload, request: Request) -> bool:
    """Returns whether something fits; not if the options contradict each other on these machines."""
    try:
        return least_plan(workload, request) is not None
    except InvalidConfig:
        return False
