"""All configurations that a request leaves open and no rule forbids, with their buffers; or why there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from dstrain.choices import LossKernel, Method, Offload
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan import rope_scaling
from dstrain.plan.configuration import (
    DEFAULTS,
    DEGREES,
    Checkpointing,
    Configuration,
    Parallel,
    changed,
    choices,
)
from dstrain.plan.estimate import auto_sizes, supported_precision
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import batch_label
from dstrain.plan.request import Request
from dstrain.plan.search.rules import Rule, broken, keeps_rules
from dstrain.plan.speed.compute import row_samples
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The words for the choices of a request where a person made them."""

    choices: str
    """Their name, as the beginning of a sentence."""
    spell: Callable[[str], str]
    """Returns a choice and its value, given the field of `Request`."""


class Unsatisfiable(InvalidConfig):
    """No way satisfies a request."""

    def __init__(self, request: Request, names: Sequence[str], say: Callable[[Terms], str], *, hint: str) -> None:
        """`names` are the fields that rule each other out; `say` names them, by default as options."""
        self.names, self.say, self.spell = names, say, partial(option, request)
        super().__init__(say(Terms(choices="the options", spell=self.spell)), hint=hint)


def unsatisfied(request: Request, name: str, why: str, *, hint: str) -> Unsatisfiable:
    """Returns the error of one choice, given its field and the end of the sentence that begins with it."""
    return Unsatisfiable(request, [name], lambda terms: f"{terms.spell(name)}{why}", hint=hint)


def contradiction(request: Request, broken: Iterable[Sequence[Rule]]) -> Unsatisfiable:
    """Returns the error of a request that no way satisfies: the options that the least broken way contradicts.

    `broken` has the rules that each way breaks.
    """
    rule = min(broken, key=len)[0]
    names = [name for name in rule.options if _is_given(request, name)]

    def say(terms: Terms) -> str:
        said = "; ".join([*([" and ".join(map(terms.spell, names))] if names else []), rule.says])
        return f"{terms.choices} contradict each other: {said}" if len(names) > 1 else said

    is_flag = all(getattr(request, name) is True for name in names)
    hint = "Remove one of them." if len(names) > 1 else "Leave it out." if is_flag else "Choose another value."
    return Unsatisfiable(request, names, say, hint=hint)


def _is_given(request: Request, name: str) -> bool:
    value = getattr(request, name)
    return value is not None and (name not in (*DEGREES, "hpz") or value > 1)


def option(request: Request, name: str) -> str:
    """Returns a choice of a request as an option, as it is typed on the command line."""
    word, value = name.replace("_", "-"), getattr(request, name)
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word} {value}"


def no_batch(cluster: Cluster, request: Request, ranks: int) -> Unsatisfiable:
    """Returns the error of a global batch that no way keeps, in numbers; `ranks` are data-parallel at most."""
    wanted = request.global_batch or 0
    groups = f"{ranks} groups of {cluster.num_gpus} GPUs" if ranks != cluster.num_gpus else counted(ranks, "GPU")
    unit = ranks * (request.micro_batch or 1) * (request.grad_accum or 1)
    options = [str(size) for size in (wanted // unit * unit, (wanted // unit + 1) * unit) if size]
    hint = f"Write --global-batch {' or '.join(options)}."
    parts = [groups]
    parts += [f"micro-batch {request.micro_batch}"] if request.micro_batch else []
    parts += [f"{request.grad_accum} accumulated"] if request.grad_accum else []
    verb = "is not" if request.micro_batch and request.grad_accum else "is not a multiple of"

    def say(terms: Terms) -> str:
        given = terms.spell("global_batch")
        if unit == ranks:
            return f"{given} cannot be shared by {groups}"
        return f"{terms.choices} contradict each other: {given} {verb} {' × '.join(parts)}"

    return Unsatisfiable(request, ["global_batch"], say, hint=hint)


TIGHT, ROOMY = 0, 2
"""The rungs that a search tries: the smallest buffers, and those that cost little and hide latency."""
SHARE_OF_ROOM = 0.5
"""Share of the memory left over that larger buffers may take; the rest stays for longer samples and fragments."""
NO_SLOWER_RATIO = 0.005
"""The slowdown that larger buffers may cause: they lengthen the first message of a hidden collective, which is
exposed."""
RATIO_STEP = 0.05
"""Step in which the offloaded share of an optimizer is lowered."""

_LARGEST_BUCKET, _SMALLEST_BUCKET = 200_000_000, 20_000_000
_LEAST_LIVE = 100_000_000
_LARGEST_SUB_GROUP_RUNG = 4


@cache
def sizes(model: ModelFacts, rung: int) -> Mapping[str, Any]:
    """Returns the engine's buffers of one rung; each rung needs as much memory as the last, or more.

    Above the lowest rung a reduce bucket of one layer hides latency without a copy of the model, and the prefetch
    bucket gathers one layer ahead. Norms and biases stay gathered. A sub-group is a power of two, so that pinned memory
    wastes nothing: 2^26 elements, doubled on each rung up to DeepSpeed's 10^9. Layers stay gathered from forward to
    backward within 0, 0.5, 1, 2, 4 … ·10^9 elements (DeepSpeed's default is 10^9).
    """
    layer = sum(g.numel * g.count for g in model.tensors) // max(1, model.num_hidden_layers)
    bucket = _SMALLEST_BUCKET if rung == TIGHT else min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, layer))
    bucket = max(2, min(bucket, model.num_params) // 2 * 2)
    reuse = 0 if rung == TIGHT else round(DEFAULTS.zero.max_reuse_distance * 2.0 ** (rung - ROOMY))
    return {
        "reduce_bucket_size": bucket,
        "prefetch_bucket_size": bucket // 4 if rung == TIGHT else bucket,
        "param_persistence_threshold": 10 * model.hidden_size,
        "max_live_parameters": max(_LEAST_LIVE, reuse),
        "max_reuse_distance": reuse,
        "sub_group_size": 2 ** (26 + min(rung, _LARGEST_SUB_GROUP_RUNG)),
    }


@cache
def sizes_of_transformers(model: ModelFacts) -> Mapping[str, Any]:
    """Returns the buffers of most published runs: "auto" as Transformers fills it in, and DeepSpeed's defaults."""
    return {key.removeprefix("stage3_"): size for key, size in auto_sizes(model.hidden_size).items()}


def sized(model: ModelFacts, configuration: Configuration, rung: int) -> Configuration:
    """Returns the configuration with the engine's buffers of one rung."""
    return replace(configuration, zero=replace(configuration.zero, **sizes(model, rung)))


def top_rung(model: ModelFacts) -> int:
    """Returns the rung on which the whole model stays gathered: a reuse distance of twice its parameters."""
    ratio = 2 * model.num_params / DEFAULTS.zero.max_reuse_distance
    return max(_LARGEST_SUB_GROUP_RUNG, ROOMY + math.ceil(math.log2(max(1.0, ratio))))


def sized_to_room(
    model: ModelFacts, estimate: Estimate, rung: int, *, assess: Callable[[Configuration], Estimate]
) -> tuple[Estimate, int]:
    """Returns the estimate with the largest buffers that the memory left over pays for, and their rung.

    Bisects the ladder above `rung`: the new total may take `SHARE_OF_ROOM` of what was left, must fit the host, and
    must not be slower. Below ZeRO-3 nothing above the roomy rung has a meaning.
    """
    limit = estimate.memory.device_bytes_per_gpu + SHARE_OF_ROOM * (
        estimate.usable_bytes_per_gpu - estimate.memory.device_bytes_per_gpu
    )
    low, high = rung, top_rung(model) if estimate.configuration.zero.stage == 3 else max(rung, ROOMY)
    while low < high:
        middle = (low + high + 1) // 2
        larger = assess(sized(model, estimate.configuration, middle))
        if larger.fits and larger.memory.device_bytes_per_gpu <= limit and not _is_slower(larger, estimate):
            low, estimate = middle, larger
        else:
            high = middle - 1
    return estimate, low


def _is_slower(one: Estimate, other: Estimate) -> bool:
    if one.speed is None or other.speed is None:
        return False
    return one.speed.step_s > (1 + NO_SLOWER_RATIO) * other.speed.step_s


def least_offloaded(estimate: Estimate, *, assess: Callable[[Configuration], Estimate]) -> Estimate:
    """Returns the estimate with as little of the optimizer offloaded as fits, where a part of it is (Twin-Flow).

    Source: deepspeed 0.19.8 runtime/zero/stage3.py: subgroup_to_device.
    """
    configuration = estimate.configuration
    while configuration.zero.offload is Offload.OPTIMIZER and configuration.zero.offload_ratio < 1:
        lower = round(configuration.zero.offload_ratio - RATIO_STEP, 2)
        zero = replace(configuration.zero, offload_ratio=lower)
        less = assess(replace(configuration, zero=zero)) if lower > 0 else None
        if less is None or not less.fits or _is_slower(less, estimate):
            break
        estimate, configuration = less, less.configuration
    return estimate


T = TypeVar("T")

SHORTEST = 256
"""Tokens of the shortest sequence that is proposed."""
DEFAULT_SEQ_LEN = DEFAULTS.batch.seq_len
"""Default sequence length, if the model supports it."""
DEFAULT_GLOBAL_BATCH = 64
"""Default samples per step, with packing rows: the usual size of supervised fine-tuning on a few nodes."""
RATIOS = (1.0, 0.75, 0.5, 0.25)
"""Shares of an optimizer that are offloaded; the one that is chosen is refined (`least_offloaded`)."""
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
    """Size of the engine's buffers (`sizes`); None: as Transformers fills them in."""
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
    """Describes one optimizer step: samples, or packed rows with their samples if those are known."""
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
    varied = {name: choices()[name].of(DEFAULTS) for name in ("zero_stage", "offload", "offload_ratio", "hpz")}
    return changed(
        asked,
        precision=request.precision or supported_precision(cluster),
        seq_len=seq_len,
        rope_scaling=scaling,
        overlap_comm=cluster.num_gpus > 1,
        **varied,
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
        # a step must exist: the smallest one may exceed the share, and so may a micro-batch that somebody asked for
        is_free = request.micro_batch is not None or micro_batch == 1
        if exact and micro_batch * accum != share:
            continue
        if not exact and micro_batch * accum > share and not is_free:
            continue
        pairs.append((micro_batch, accum))
    return pairs


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
