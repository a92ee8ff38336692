"""Reasons for a choice: comparisons with its alternatives, in sentences with numbers."""

from __future__ import annotations

from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate_records import Estimate, Reason, Topic
from dstrain.plan.labels import OPTIMIZER_WORDS, label
from dstrain.plan.memory.params import trained
from dstrain.plan.request import Request
from dstrain.plan.search.alternatives import Neighbour, faster_but_too_large, gain_ratio, missing_bytes
from dstrain.plan.search.buffer_sizes import TIGHT
from dstrain.plan.search.search import EQUAL_RATIO, TIE_RATIO, Ranking
from dstrain.plan.search.search_space import batch_words, data_parallel_ranks
from dstrain.units import MIB, format_bytes, format_count, format_seconds

MOST_SENTENCES = 3
"""Maximum number of sentences of one kind."""
LOAD_IN_RAM_RATIO = 0.25
"""A reason gives the host RAM of a plan without offload if it is more than this share of the node's."""


def reasons(
    workload: Workload,
    request: Request,
    chosen: Estimate,
    *,
    ranking: Ranking,
    rung: int | None,
    others: list[Neighbour],
    eight_bit: Estimate | None = None,
) -> tuple[Reason, ...]:
    """Returns why, in sentences: speed and its limit, a faster plan that was passed over, an optimizer of 8 bits that
    would spare the offload, what was chosen over what, what would change it, the states, the peak, host RAM, the batch,
    the engine's buffers."""
    cluster = workload.cluster
    return (
        *_speed(chosen),
        *_simpler(cluster, ranking),
        *_eight_bit(cluster, chosen, eight_bit),
        *_over(cluster, request, chosen, others),
        *_with_more(cluster, chosen, others),
        *_memory(workload, chosen),
        _batch(workload, chosen.configuration),
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
        text = f"{'as fast as' if abs(gain) <= EQUAL_RATIO else f'{_percent(gain)} than'} plan 1, {more}"
    return (Reason(topic=Topic.FIRST_PLAN, text=text), *(_speed(one) if one.fits else ()))


def _simpler(cluster: Cluster, ranking: Ranking) -> tuple[Reason, ...]:
    """Returns why the first of a ranking comes before the fastest, if it is slower by more than a tie."""
    gain = gain_ratio(cluster, ranking.fastest, ranking.plans[0])
    if not ranking.fits or gain is None or gain <= EQUAL_RATIO:
        return ()
    worth = percent(max(ranking.difference_error_ratio, TIE_RATIO))
    faster = f"{percent(gain).removesuffix(' %')} ± {worth} faster"
    text = f"simpler than {label(ranking.fastest.configuration)} ({faster})"
    return (Reason(topic=Topic.SIMPLER, text=text),)


def _eight_bit(cluster: Cluster, chosen: Estimate, other: Estimate | None) -> tuple[Reason, ...]:
    """Returns what 8-bit AdamW on the GPU would gain over an offloaded optimizer."""
    gain = gain_ratio(cluster, other, chosen) if other is not None else None
    if other is None or other.speed is None or gain is None:
        return ()
    words, rate = OPTIMIZER_WORDS[other.configuration.step.optimizer], other.speed.tokens_per_s_per_gpu
    text = (
        f"{words} without offload would be {_percent(gain)} and fits ({label(other.configuration)}:"
        f" {rate:,.0f} tokens a second on each GPU, {format_bytes(other.memory.device_bytes_per_gpu)}); it rounds the"
        f" moments: --optimizer {other.configuration.step.optimizer}"
    )
    return (Reason(topic=Topic.OFFLOAD, text=text),)


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
        f" {known.tokens_per_s_per_gpu:,.0f} tokens a second on each GPU, MFU {percent(known.mfu_ratio)}; limited"
        f" by {known.limited_by}{f' ({most})' if most else ''}"
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
        if gain > EQUAL_RATIO:
            text = f"{neighbour.chosen} over {neighbour.other}: {_percent(gain)}, {memory}"
            said.append((gain, text, neighbour.topic))
        elif gain >= -EQUAL_RATIO:
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
        if gain is not None and gain < best + EQUAL_RATIO:
            continue
        best = gain or 0.0
        where = "per GPU" if not neighbour.estimate.fits_gpu else "of host RAM on each node"
        would = "would fit" if gain is None else f"would be {_percent(gain)}"
        text = f"with {format_bytes(missing_bytes(neighbour.estimate))} more {where}, {neighbour.other} {would}"
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
    logits = f" and {format_bytes(parts.logits)} logits" if parts.logits >= MIB else ""  # else the loss alone
    peak = (
        f"the peak is at {needs.peak_instant}: {format_bytes(needs.device_bytes_per_gpu)} of"
        f" {format_bytes(cluster.gpu.memory_bytes)}, of which {format_bytes(parts.activations)} activations{logits}"
    )
    said = [(Topic.MODEL_STATES, trains), (Topic.PEAK, peak)]
    is_at_load = needs.load.host_bytes_per_node == needs.host_bytes_per_node
    is_away = configuration.zero.is_offloaded or configuration.checkpointing.offload
    if is_away or needs.host_bytes_per_node > LOAD_IN_RAM_RATIO * cluster.host_memory_bytes:
        needed, there = format_bytes(needs.host_bytes_per_node), format_bytes(cluster.host_memory_bytes)
        when = ", while the model is loaded" if is_at_load else ""
        said.append((Topic.HOST_RAM, f"host RAM: {needed} of {there} on each node{when}"))
    return [Reason(topic=topic, text=text) for topic, text in said]


def _batch(workload: Workload, configuration: Configuration) -> Reason:
    """Returns the arithmetic of the batch."""
    cluster = workload.cluster
    gpus = "1 GPU" if cluster.num_gpus == 1 else f"{cluster.num_gpus} GPUs"
    ranks = data_parallel_ranks(cluster, configuration)
    divided = "" if ranks == cluster.num_gpus else f" / {cluster.num_gpus // ranks} in parallel on each sample"
    micro_batch, grad_accum = configuration.batch.micro_batch, configuration.step.grad_accum
    parts = f"{gpus}{divided} × micro-batch {micro_batch} × {grad_accum} accumulated"
    return Reason(topic=Topic.BATCH, text=f"{parts} = {batch_words(workload, configuration)} a step")


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
        basis = f"engine buffers sized to the free memory, of which {left} remain"
    topic = Topic.ZERO3_BUFFERS if zero.stage == 3 else Topic.BUFFERS
    return [Reason(topic=topic, text=f"{basis}: {bucket}")]
