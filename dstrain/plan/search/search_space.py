"""All configurations that a request leaves open and no rule forbids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from dstrain.choices import LossKernel, Method, Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan import rope_scaling
from dstrain.plan.configuration import Checkpointing, Configuration, Parallel, Zero
from dstrain.plan.estimate import supported_precision
from dstrain.plan.labels import batch_label
from dstrain.plan.request import Request
from dstrain.plan.search.buffer_sizes import ROOMY, TIGHT, sizes, sizes_of_transformers
from dstrain.plan.search.contradictions import contradiction, no_batch
from dstrain.plan.search.rules import Rule, broken, keeps_rules
from dstrain.plan.speed.setting import row_samples

T = TypeVar("T")

DEFAULT_SEQ_LEN = 4096
"""Default sequence length, if the model supports it."""
DEFAULT_GLOBAL_BATCH = 64
"""Default samples per step, with packing rows: the usual size of supervised fine-tuning on a few nodes."""
RATIOS = (1.0, 0.75, 0.5, 0.25)
"""Shares of an optimizer that are offloaded; the one that is chosen is refined (`buffer_sizes.least_offloaded`)."""
LEAST_TILES = 4
"""Tiles of a row's MLP from which tiling is considered: it saves the more, the more there are."""
PERIODS = (1, 2, 4)
"""Of how many layers one is recomputed; beyond 4, recomputing costs less than 6 % of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One configuration in short; `configuration` writes it out. Each is made once, and equal to itself alone."""

    way: Configuration
    """The strategy: everything except batch and buffers."""
    micro_batch: int
    """Samples of one forward of one GPU."""
    grad_accum: int
    """Micro-batches of one optimizer step."""
    rung: int | None
    """Size of the engine's buffers (`buffer_sizes.sizes`); None: as Transformers fills them in."""
    pin_memory: bool
    """Whether offloaded states are in page-locked memory."""

    def configuration(self, model: ModelFacts) -> Configuration:
        """Returns the whole configuration."""
        buffers = sizes_of_transformers(model) if self.rung is None else sizes(model, self.rung)
        zero = replace(self.way.zero, pin_memory=self.pin_memory, **buffers)
        return replace(with_batch(self.way, self.micro_batch, self.grad_accum), zero=zero)


def with_batch(configuration: Configuration, micro_batch: int, grad_accum: int) -> Configuration:
    """Returns the configuration with another micro-batch and accumulation."""
    batch = replace(configuration.batch, micro_batch=micro_batch)
    return replace(configuration, batch=batch, step=replace(configuration.step, grad_accum=grad_accum))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """The strategies that a request leaves open, before batches and buffers."""

    allowed: tuple[Configuration, ...]
    """Strategies that break no rule."""
    forbidden: tuple[tuple[Configuration, tuple[Rule, ...]], ...]
    """The other strategies, with the rules of parallelism that they break, if any."""


def in_ram_too(workload: Workload, request: Request) -> tuple[Request, ...]:
    """Returns the request with all layers recomputed from inputs in RAM, if that is open.

    Their copies take time in every micro-batch, so they are for a GPU whose best or fastest plan without them offloads
    states, or for which there is none.
    """
    is_open = request.activation_offload is None and request.grad_ckpt is not False
    asked = replace(request, activation_offload=True, grad_ckpt=True)
    if not is_open or asked.is_one_configuration or workload.cluster.gpu.is_cpu:
        return ()
    return (asked,)


def space(workload: Workload, request: Request) -> list[Candidate]:
    """Returns every candidate.

    stage × offload (with its ratio) × checkpointing × hpZ × SP × TP × EP, less what `rules` forbid, × every micro-batch
    and accumulation that keep the global batch × buffers. What the request fixes does not vary. Raises InvalidConfig if
    nothing is left, with the options that contradict each other.
    """
    cluster = workload.cluster
    strategies = ways(workload, request)
    if not strategies.allowed:
        raise contradiction(request, [rules or broken(workload, way) for way, rules in strategies.forbidden])
    sizes_of_dp = {data_parallel_ranks(cluster, way) for way in strategies.allowed}
    by_ranks = {ranks: batches(request, ranks) for ranks in sizes_of_dp}
    candidates = [
        Candidate(way, micro_batch, accum, rung, pinned)
        for way in strategies.allowed
        for micro_batch, accum in by_ranks[data_parallel_ranks(cluster, way)]
        for rung, pinned in _buffers(request, way)
    ]
    if not candidates:
        most = max(data_parallel_ranks(cluster, way) for way in strategies.allowed)
        raise no_batch(cluster, request, most)
    return candidates


def data_parallel_ranks(cluster: Cluster, configuration: Configuration) -> int:
    """Returns the number of data-parallel ranks: N / (SP · TP)."""
    return max(1, cluster.num_gpus // (configuration.parallel.sp * configuration.parallel.tp))


def global_batch(cluster: Cluster, configuration: Configuration) -> int:
    """Returns the samples of one optimizer step; with packing its rows.

    Source: deepspeed 0.19.8 runtime/config.py: _batch_assertion, with the data-parallel world.
    """
    return data_parallel_ranks(cluster, configuration) * configuration.batch.micro_batch * configuration.step.grad_accum


def batch_words(workload: Workload, configuration: Configuration) -> str:
    """Returns what one optimizer step has, in words: samples, or packed rows with their samples if those are known."""
    batch = global_batch(workload.cluster, configuration)
    in_row = row_samples(configuration, workload.contents)
    return batch_label(batch, packing=configuration.batch.packing, row_samples=in_row)


def strategy_key(configuration: Configuration) -> tuple[object, ...]:
    """Returns the identity of a strategy, which excludes batches, buffers and how many layers are recomputed."""
    zero, recomputed = configuration.zero, configuration.checkpointing
    layers = recomputed.enabled, recomputed.offload, recomputed.tiled_mlp
    return zero.stage, zero.offload, zero.hpz, *layers, configuration.parallel


def mechanisms(configuration: Configuration) -> int:
    """Returns how many mechanisms a configuration uses: the measure of simplicity.

    One for each part that ZeRO shares out (its stage), for checkpointing, tiled MLPs, TP, hpZ, a divided optimizer and
    pageable memory, and for layers' inputs in RAM; two for each step that states go away from the GPU (optimizer,
    parameters, NVMe), which depend on the RAM, CPU and disk of every node. SP depends on the model's attention and on
    links in every layer: two for SP 2, and one more each time that twice as many ranks wait for each other; EP likewise
    depends on how tokens are spread.
    """
    zero, parallel = configuration.zero, configuration.parallel
    is_pageable = zero.is_offloaded and not zero.pin_memory
    recomputed = configuration.checkpointing
    recomputation = (recomputed.enabled, recomputed.tiled_mlp, recomputed.offload)
    extras = (*recomputation, parallel.tp > 1, zero.hpz > 1, zero.offload_ratio < 1, is_pageable)
    groups = sum(degree.bit_length() for degree in (parallel.sp, parallel.ep) if degree > 1)
    away = list(Offload).index(zero.offload)
    return zero.stage + 2 * away + groups + sum(extras)


def ways(workload: Workload, request: Request) -> Strategies:
    """Returns every combination of mechanisms, sorted into allowed and forbidden."""
    start = with_defaults(workload, request)
    allowed: list[Configuration] = []
    forbidden: list[tuple[Configuration, tuple[Rule, ...]]] = []
    for degrees in _parallel(workload, request):
        parallel = _with_loss(workload, request, replace(start, parallel=degrees))
        wrong = [rule for rule in broken(workload, parallel) if rule.is_of_parallelism]
        if wrong:
            forbidden.append((parallel, tuple(wrong)))
            continue
        for way in _mechanisms(workload, request, parallel):
            if keeps_rules(workload, way):
                allowed.append(way)
            else:
                forbidden.append((way, ()))
    return Strategies(allowed=tuple(allowed), forbidden=tuple(forbidden))


def _with_loss(workload: Workload, request: Request, start: Configuration) -> Configuration:
    """Returns a configuration with the loss that is asked for, or the one of least memory that no rule forbids."""
    options = _given(request.loss, (LossKernel.FUSED, LossKernel.CHUNKED, LossKernel.FULL))
    ways = [replace(start, kernels=replace(start.kernels, loss=loss)) for loss in options]
    return next((way for way in ways if not any("loss" in rule.options for rule in broken(workload, way))), ways[-1])


def row_tokens(request: Request, model: ModelFacts) -> int:
    """Returns the tokens of the longest row, by default if the request leaves them open."""
    return request.seq_len or min(DEFAULT_SEQ_LEN, model.max_position_embeddings)


def with_defaults(workload: Workload, request: Request) -> Configuration:
    """Returns the start of the search: all that does not vary."""
    model, cluster = workload.model, workload.cluster
    seq_len = row_tokens(request, model)
    scaling = rope_scaling.chosen(model, request.rope_scaling, seq_len)
    asked = request.of_model(model)
    return replace(
        asked,
        model=replace(asked.model, precision=request.precision or supported_precision(cluster)),
        batch=replace(asked.batch, seq_len=seq_len, rope_scaling=scaling),
        zero=Zero(overlap_comm=cluster.num_gpus > 1, qwz=request.qwz),
    )


def _given(value: T | None, otherwise: tuple[T, ...]) -> tuple[T, ...]:
    return otherwise if value is None else (value,)


def _parallel(workload: Workload, request: Request) -> Iterator[Parallel]:
    """Yields degrees of parallelism, powers of two: sequences over all GPUs, weights and experts inside a node."""
    cluster = workload.cluster
    one = (1,) if request.is_one_configuration else None
    batch, gpus = request.global_batch, cluster.num_gpus
    odd = (1,) if batch is not None and batch % gpus and gpus % batch else None  # no reason to share rows
    for sp in _given(request.sp, one or odd or _powers_of_two(gpus)):
        for tp in _given(request.tp, one or _powers_of_two(cluster.gpus_per_node)):
            is_alone = sp == tp == 1 and workload.model.moe is not None
            for ep in _given(request.ep, one or (_powers_of_two(cluster.gpus_per_node) if is_alone else (1,))):
                yield Parallel(sp=sp, tp=tp, ep=ep)


def _powers_of_two(limit: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit)


def _mechanisms(workload: Workload, request: Request, start: Configuration) -> Iterator[Configuration]:
    """Yields stage × offload × ratio × hpZ × checkpointing."""
    is_one, cluster = request.is_one_configuration, workload.cluster
    is_divided = request.method is Method.FULL and not is_one  # an adapter's states are too small to divide
    tiles = start.batch.seq_len // (start.parallel.sp * workload.model.hidden_size)
    recomputations = list(_checkpointings(request, start.checkpointing, tiles=tiles))
    for stage in _given(request.zero_stage, (0, 1, 2, 3)):
        for offload in _given(request.offload, tuple(Offload)):
            ratios = RATIOS if offload is Offload.OPTIMIZER and stage == 3 and is_divided else (1.0,)
            copies = (1, cluster.gpus_per_node) if stage == 3 and cluster.num_nodes > 1 and not is_one else (1,)
            for ratio in _given(request.offload_ratio, ratios):
                for hpz in _given(request.hpz, tuple(dict.fromkeys(copies))):
                    zero = replace(start.zero, stage=stage, offload=offload, offload_ratio=ratio, hpz=hpz)
                    for checkpointing in recomputations:
                        yield replace(start, zero=zero, checkpointing=checkpointing)


def _checkpointings(request: Request, start: Checkpointing, *, tiles: int) -> Iterator[Checkpointing]:
    """Yields which layers are recomputed: none, all, or, where that is open, one of every n; and, with all of them and
    rows of many tiles, whether MLPs are tiled. Inputs wait in host RAM if that is asked for (`in_ram_too`)."""
    periods = PERIODS if request.grad_ckpt is None else (1,)
    is_open = tiles >= LEAST_TILES and not request.is_one_configuration
    either = (True,) if (request.grad_ckpt_every_n_layers or 1) > 1 else (False, True)
    for enabled in _given(request.grad_ckpt, either):
        for period in _given(request.grad_ckpt_every_n_layers, periods if enabled else (1,)):
            tiled = (False, True) if is_open and enabled and period == 1 else (False,)
            for tiled_mlp in _given(request.tiled_mlp, tiled):
                yield replace(start, enabled=enabled, every_n_layers=period, tiled_mlp=tiled_mlp)


def _buffers(request: Request, way: Configuration) -> tuple[tuple[int | None, bool], ...]:
    """Returns sizes of buffers with page-locked memory or, where states are offloaded, without at last."""
    if request.is_one_configuration:
        return ((None, True),)
    sizes: tuple[tuple[int | None, bool], ...] = ((ROOMY, True), (TIGHT, True))
    return (*sizes, (TIGHT, False)) if way.zero.is_offloaded else sizes


def batches(request: Request, ranks: int) -> list[tuple[int, int]]:
    """Returns micro-batch and accumulation of every way to make a step on `ranks` data-parallel ranks.

    A given global batch is kept exactly: every divisor of its share is a micro-batch. Else powers of two and divisors,
    up to the share of a rank in `DEFAULT_GLOBAL_BATCH` samples, which no step exceeds while it can.

    >>> batches(Request(global_batch=48), 8)
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    >>> batches(Request(grad_accum=4), 8)
    [(1, 4), (2, 4)]
    """
    exact = request.global_batch is not None
    if request.global_batch is not None and request.global_batch % ranks:
        return []
    share = max(1, (request.global_batch or DEFAULT_GLOBAL_BATCH) // ranks)
    sizes = _divisors(share) if exact else sorted({*_divisors(share), *_powers_of_two(share)})
    pairs = []
    for micro_batch in _given(request.micro_batch, tuple(sizes)):
        accum = request.grad_accum or max(1, share // micro_batch)
        is_free = request.micro_batch is not None or micro_batch == 1
        if exact and micro_batch * accum != share:
            continue
        if not exact and micro_batch * accum > share and not is_free:
            continue
        pairs.append((micro_batch, accum))
    return pairs


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
