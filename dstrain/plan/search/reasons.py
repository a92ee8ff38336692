"""Reasons for a choice: comparisons with its alternatives, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dstrain.choices import Offload
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import OFFLOAD_WORDS, Configuration
from dstrain.plan.estimate_records import Estimate, Reason, Speed, Topic
from dstrain.plan.labels import OPTIMIZER_WORDS
from dstrain.plan.memory.params import trained
from dstrain.plan.request import Request
from dstrain.plan.search.buffer_sizes import TIGHT, sized
from dstrain.plan.search.rules import broken
from dstrain.plan.search.search import TIE_RATIO
from dstrain.plan.search.search_space import data_parallel_ranks, global_batch, with_batch
from dstrain.units import format_bytes, format_count, format_seconds

MOST_SENTENCES = 3
"""Maximum number of sentences of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """An alternative that differs in one choice."""

    chosen: str
    """The choice as it is: `ZeRO-3`."""
    other: str
    """The choice as it could be: `ZeRO-2`."""
    topic: Topic
    """The choice that differs."""
    estimate: Estimate
    """The estimate of the alternative."""


def neighbours(
    workload: Workload, request: Request, chosen: Estimate, *, assess: Callable[[Configuration], Estimate]
) -> list[Neighbour]:
    """Returns the estimates with one choice taken otherwise, where rules allow; with small buffers where they need to.

    Choices that the request fixes are among them, so that it can be said what they cost.
    """
    alternatives = []
    for topic, mine, other, configuration in _flips(request, chosen.configuration):
        if broken(workload, configuration, writable=request.writable):
            continue
        estimate = assess(configuration)
        if not estimate.fits:
            estimate = assess(sized(workload.model, configuration, TIGHT))
        alternatives.append(Neighbour(chosen=mine, other=other, topic=topic, estimate=estimate))
    return alternatives


def _flips(request: Request, chosen: Configuration) -> Iterator[tuple[Topic, str, str, Configuration]]:
    """Yields topic, the choice as it is and as it could be in words, and the configuration that it would make."""
    zero, is_enabled = chosen.zero, chosen.checkpointing.enabled
    for stage in (0, 1, 2, 3):
        if stage != zero.stage:
            hpz, ratio = (zero.hpz, zero.offload_ratio) if stage == 3 else (1, 1.0)
            other = replace(chosen, zero=replace(zero, stage=stage, hpz=hpz, offload_ratio=ratio))
            yield Topic.ZERO_STAGE, f"ZeRO-{zero.stage}", f"ZeRO-{stage}", other
    for offload in Offload:
        if offload is not zero.offload:
            other = replace(chosen, zero=replace(zero, offload=offload, offload_ratio=1.0))
            yield Topic.OFFLOAD, _offload_words(zero.offload), _offload_words(offload), other
    words = ("no checkpointing", "checkpointing")
    other = replace(chosen, checkpointing=replace(chosen.checkpointing, enabled=not is_enabled))
    yield Topic.GRAD_CKPT, words[is_enabled], words[not is_enabled], other
    micro_batch, grad_accum = chosen.batch.micro_batch, chosen.step.grad_accum
    batches = [(2 * micro_batch, grad_accum // 2)] if grad_accum % 2 == 0 else []
    batches += [(micro_batch // 2, 2 * grad_accum)] if micro_batch % 2 == 0 else []
    for count, accum in batches:
        yield Topic.MICRO_BATCH, f"micro-batch {micro_batch}", f"micro-batch {count}", with_batch(chosen, count, accum)
    if zero.hpz > 1:
        yield Topic.HPZ, f"hpZ {zero.hpz}", "no hpZ", replace(chosen, zero=replace(zero, hpz=1))


def _offload_words(offload: Offload) -> str:
    return "no offload" if offload is Offload.NONE else OFFLOAD_WORDS[offload]


def faster_but_too_large(cluster: Cluster, chosen: Estimate, others: list[Neighbour]) -> tuple[Neighbour, ...]:
    """Returns the neighbours that would be faster and do not fit, the nearest to fitting first.

    What lacks as much as there is was never in reach. Where speed is not known, what leaves more on the GPU counts as
    faster.
    """
    too_large = [
        neighbour
        for neighbour in others
        if not neighbour.estimate.fits
        and _would_be_faster(cluster, chosen, neighbour)
        and _missing_bytes(neighbour.estimate) < _present_bytes(neighbour.estimate)
    ]
    return tuple(sorted(too_large, key=lambda neighbour: _missing_bytes(neighbour.estimate)))


def _would_be_faster(cluster: Cluster, chosen: Estimate, other: Neighbour) -> bool:
    gain = gain_ratio(cluster, other.estimate, chosen)
    more_bytes = other.estimate.memory.device_bytes_per_gpu - chosen.memory.device_bytes_per_gpu
    return more_bytes > 0 if gain is None else gain > TIE_RATIO


def gain_ratio(cluster: Cluster, one: Estimate, other: Estimate) -> float | None:
    """Returns by what share `one` is faster than `other` for each sample, or None if speed is unknown."""
    if one.speed is None or other.speed is None:
        return None
    return _sample_s(cluster, other, other.speed) / _sample_s(cluster, one, one.speed) - 1


def _sample_s(cluster: Cluster, estimate: Estimate, speed: Speed) -> float:
    return speed.step_s / global_batch(cluster, estimate.configuration)


def _missing_bytes(estimate: Estimate) -> int:
    """Returns the bytes that an estimate lacks, on the GPU or, where that fits, in host RAM."""
    if not estimate.fits_gpu:
        return estimate.memory.device_bytes_per_gpu - estimate.usable_bytes_per_gpu
    return estimate.memory.host_bytes_per_node - estimate.usable_bytes_per_host


def _present_bytes(estimate: Estimate) -> int:
    """Returns what may be used of what an estimate lacks."""
    return estimate.usable_bytes_per_host if estimate.fits_gpu else estimate.usable_bytes_per_gpu


def reasons(
    workload: Workload, request: Request, chosen: Estimate, *, rung: int | None, others: list[Neighbour]
) -> tuple[Reason, ...]:
    """Returns why, in sentences: speed and its limit, what was chosen over what, what would change it, the states, the
    peak, host RAM, the batch, the engine's buffers."""
    cluster = workload.cluster
    return (
        *_speed(chosen),
        *_over(cluster, request, chosen, others),
        *_with_more(cluster, chosen, others),
        *_memory(workload, chosen),
        _batch(cluster, chosen.configuration),
        *_buffers(chosen, rung),
    )


def compared(cluster: Cluster, one: Estimate, best: Estimate) -> tuple[Reason, ...]:
    """Returns the comparison of a plan with the best one, in one sentence."""
    gain = gain_ratio(cluster, one, best)
    more = _more_bytes(one, best)
    if not one.fits:
        text = f"does not fit: {one.shortage}"
    elif gain is None:
        is_same = one.memory.device_bytes_per_gpu == best.memory.device_bytes_per_gpu
        text = f"{more} {'as' if is_same else 'than'} plan 1"
    else:
        text = f"{'as fast as' if abs(gain) <= TIE_RATIO else f'{_percent(gain)} than'} plan 1, {more}"
    return (Reason(topic=Topic.FIRST_PLAN, text=text), *(_speed(one) if one.fits else ()))


def _percent(gain: float) -> str:
    """Returns a gain in words.

    >>> _percent(0.07), _percent(-0.2), _percent(1.5)
    ('7 % faster', '20 % slower', '2.5 × as fast')
    """
    if gain >= 1:
        return f"{1 + gain:.1f} × as fast"
    return percent(abs(gain)) + (" faster" if gain > 0 else " slower")


def percent(ratio: float) -> str:
    """Returns a ratio in percent.

    >>> percent(0.417)
    '42 %'
    """
    return f"{100 * ratio:.0f} %"


def _more_bytes(one: Estimate, other: Estimate) -> str:
    difference = one.memory.device_bytes_per_gpu - other.memory.device_bytes_per_gpu
    if not difference:
        return "the same memory"
    return f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'} per GPU"


def _speed(chosen: Estimate) -> list[Reason]:
    """Returns the step time and its bottlenecks."""
    if chosen.speed is None:
        return []
    known = chosen.speed
    parts = sorted(known.parts_s.items(), key=lambda part: -part[1])[:MOST_SENTENCES]
    most = ", ".join(f"{name} {percent(seconds / known.step_s)}" for name, seconds in parts if seconds > 0)
    text = (
        f"a step takes {format_seconds(known.step_s)} (± {percent(known.uncertainty_ratio)}):"
        f" {known.tokens_per_s_per_gpu:,.0f} tokens a second on each GPU, MFU {percent(known.mfu_ratio)}; it waits most"
        f" for {known.limited_by}{f' ({most})' if most else ''}"
    )
    return [Reason(topic=Topic.SPEED, text=text)]


def _over(cluster: Cluster, request: Request, chosen: Estimate, others: list[Neighbour]) -> list[Reason]:
    """Returns each choice with the alternative it beat and the margin, closest decisions first."""
    said = []
    for neighbour in others:
        gain = gain_ratio(cluster, chosen, neighbour.estimate)
        if gain is None or not neighbour.estimate.fits:
            continue
        memory = _more_bytes(chosen, neighbour.estimate)
        if gain > TIE_RATIO:
            text = f"{neighbour.chosen} over {neighbour.other}: {_percent(gain)}, {memory}"
            said.append((gain, text, neighbour.topic))
        elif gain >= -TIE_RATIO:
            text = f"{neighbour.chosen} over {neighbour.other}: as fast, {memory}"
            said.append((abs(gain), text, neighbour.topic))
        elif getattr(request, neighbour.topic, None) is not None:
            faster = _percent(1 / (1 + gain) - 1)
            text = f"{neighbour.chosen}, as asked; {neighbour.other} would be {faster} and fits too"
            said.append((0.0, text, neighbour.topic))
    return [Reason(topic=topic, text=text) for _, text, topic in sorted(said)[:MOST_SENTENCES]]


def _with_more(cluster: Cluster, chosen: Estimate, others: list[Neighbour]) -> list[Reason]:
    """Returns what more memory would change: the nearest change, and those that need more and bring more."""
    said, best = [], 0.0
    for neighbour in faster_but_too_large(cluster, chosen, others):
        gain = gain_ratio(cluster, neighbour.estimate, chosen)
        if gain is not None and gain < best + TIE_RATIO:
            continue
        best = gain or 0.0
        where = "per GPU" if not neighbour.estimate.fits_gpu else "of host RAM on each node"
        would = "would fit" if gain is None else f"would be {_percent(gain)}"
        text = f"with {format_bytes(_missing_bytes(neighbour.estimate))} more {where}, {neighbour.other} {would}"
        said.append(Reason(topic=neighbour.topic, text=text))
    return said[:MOST_SENTENCES]


def _memory(workload: Workload, chosen: Estimate) -> list[Reason]:
    """Returns what trains, the states on each GPU, the peak, and host RAM."""
    model, cluster = workload.model, workload.cluster
    configuration, needs, states = chosen.configuration, chosen.memory, chosen.memory.states
    trainable = trained(model, configuration.model.method, configuration.model.lora).trainable
    share = "all" if trainable == model.num_params else f"{format_count(trainable)} of"
    parts = needs.breakdown_bytes
    trains = (
        f"{share} {format_count(model.num_params)} parameters train; in {configuration.model.precision} with"
        f" {OPTIMIZER_WORDS[configuration.step.optimizer]} that is"
        f" {format_bytes(states.device)} of model states on each GPU (parameters {format_bytes(states.params)},"
        f" gradients {format_bytes(states.grads)}, optimizer {format_bytes(states.optimizer)})"
    )
    peak = (
        f"the peak is at {needs.peak_instant}: {format_bytes(needs.device_bytes_per_gpu)} of"
        f" {format_bytes(cluster.gpu.memory_bytes)}, of which {format_bytes(parts.activations)} activations and"
        f" {format_bytes(parts.logits)} logits"
    )
    said = [(Topic.MODEL_STATES, trains), (Topic.PEAK, peak)]
    if configuration.zero.is_offloaded:
        needed, there = format_bytes(needs.host_bytes_per_node), format_bytes(cluster.host_memory_bytes)
        said.append((Topic.HOST_RAM, f"host RAM: {needed} of {there} on each node"))
    return [Reason(topic=topic, text=text) for topic, text in said]


def _batch(cluster: Cluster, configuration: Configuration) -> Reason:
    """Returns the arithmetic of the batch."""
    gpus = "1 GPU" if cluster.num_gpus == 1 else f"{cluster.num_gpus} GPUs"
    ranks = data_parallel_ranks(cluster, configuration)
    divided = "" if ranks == cluster.num_gpus else f" / {cluster.num_gpus // ranks} in parallel on each sample"
    micro_batch, grad_accum = configuration.batch.micro_batch, configuration.step.grad_accum
    parts = f"{gpus}{divided} × micro-batch {micro_batch} × {grad_accum} accumulated"
    return Reason(topic=Topic.BATCH, text=f"{parts} = {global_batch(cluster, configuration)} samples a step")


def _buffers(chosen: Estimate, rung: int | None) -> list[Reason]:
    """Returns the sizes of the engine's buffers and the rule behind them."""
    zero = chosen.configuration.zero
    if zero.stage == 0:
        return []
    bucket = f"reduce bucket {format_count(zero.reduce_bucket_size)} elements"
    if zero.stage == 3:
        reuse = zero.max_reuse_distance
        kept = f"layers stay gathered within {format_count(reuse)}" if reuse else "no layer stays gathered"
        bucket += f", {kept}, sub-groups of {format_count(zero.sub_group_size)}"
    if zero.offload_ratio < 1:
        bucket += f", {percent(zero.offload_ratio)} of the optimizer on the CPU"
    if rung is None:
        basis = 'engine buffers as Transformers fills "auto"'
    elif rung == TIGHT:
        basis = "small engine buffers make it fit" if chosen.fits else "the smallest engine buffers"
    else:
        left = format_bytes(max(0, chosen.usable_bytes_per_gpu - chosen.memory.device_bytes_per_gpu))
        basis = f"engine buffers sized to the memory left, {left} after them"
    topic = Topic.ZERO3_BUFFERS if zero.stage == 3 else Topic.BUFFERS
    return [Reason(topic=topic, text=f"{basis}: {bucket}")]
