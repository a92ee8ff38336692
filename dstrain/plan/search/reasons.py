"""Reasons for a choice: comparisons with its alternatives, in sentences with numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration, Parallel, flat
from dstrain.plan.estimate_records import Estimate, Reason, Topic
from dstrain.plan.labels import OPTIMIZER_WORDS, label, short_label
from dstrain.plan.memory.memory import waiting_bytes
from dstrain.plan.memory.params import trained
from dstrain.plan.request import SPEED, Request
from dstrain.plan.search.alternatives import Neighbour, faster_but_too_large, gain_ratio, missing_bytes
from dstrain.plan.search.search import EQUAL_RATIO, TIE_RATIO, Ranking
from dstrain.plan.search.search_space import TIGHT, batch_words, data_parallel_ranks, mechanisms, option
from dstrain.plan.speed.step_time import LIMITS
from dstrain.units import MIB, format_bytes, format_count, format_seconds

LEAST_OTHER_SHARE = 0.2
"""Share of a step from which a part is named that is none of what limits it."""
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
    free: Estimate | None = None,
) -> tuple[Reason, ...]:
    """Returns why, in sentences: speed and its limit, a faster plan that was passed over, dstrain's own choice (`free`)
    where another was asked for, an optimizer of 8 bits that would spare the offload, what was chosen over what, what
    would change it, the states, the peak, host RAM, the batch, the engine's buffers."""
    cluster = workload.cluster
    return (
        *_speed(chosen),
        *_simpler(cluster, chosen, ranking),
        *_as_asked(cluster, request, chosen, free),
        *_eight_bit(cluster, request, chosen, eight_bit),
        *_over(cluster, chosen, others),
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
        text = f"{'as fast as' if abs(gain) <= EQUAL_RATIO else f'{faster(gain)} than'} plan 1, {more}"
    return (Reason(topic=Topic.FIRST_PLAN, text=text), *(_speed(one) if one.fits else ()))


def _simpler(cluster: Cluster, chosen: Estimate, ranking: Ranking) -> tuple[Reason, ...]:
    """Returns why the choice comes before the fastest plan, if it is slower by more than a tie."""
    gain = gain_ratio(cluster, ranking.fastest, chosen)
    if not ranking.fits or gain is None or gain <= EQUAL_RATIO:
        return ()
    worth = percent(max(ranking.difference_error_ratio, TIE_RATIO))
    gained = f"{percent(gain).removesuffix(' %')} ± {worth} faster, {_more_bytes(ranking.fastest, chosen)}"
    other = ranking.fastest.configuration
    text = f"{_advantage(chosen.configuration, other)} than {short_label(other)} ({gained})"
    return (Reason(topic=Topic.SIMPLER, text=text),)


def _advantage(chosen: Configuration, fastest: Configuration) -> str:
    """Returns in what a choice is better than a faster plan, as the order of ties has it (`search._Tied`).

    >>> from dstrain.plan.configuration import DEFAULTS, changed
    >>> one, larger = changed(DEFAULTS, zero_stage=3, ep=2), {"zero_stage": 3, "micro_batch": 4}
    >>> _advantage(one, changed(DEFAULTS, ep=4, **larger)), _advantage(one, changed(DEFAULTS, ep=2, hpz=8, **larger))
    ('with smaller groups of GPUs', 'simpler')
    >>> packed = changed(one, packing=True)
    >>> _advantage(one, changed(DEFAULTS, ep=2, **larger)), _advantage(packed, changed(packed, **larger))
    ('with less padding', 'with larger engine buffers')
    """
    alone = Parallel()
    apart = mechanisms(replace(fastest, parallel=alone)) - mechanisms(replace(chosen, parallel=alone))
    shared = [(c.parallel.sp > 1, c.parallel.tp > 1, c.parallel.ep > 1) for c in (chosen, fastest)]
    if mechanisms(chosen) < mechanisms(fastest):
        return "with smaller groups of GPUs" if apart == 0 and shared[0] == shared[1] else "simpler"
    is_padded = not chosen.batch.packing
    if is_padded and chosen.batch.micro_batch < fastest.batch.micro_batch:
        return "with less padding"
    return "with larger engine buffers"


def _as_asked(cluster: Cluster, request: Request, chosen: Estimate, other: Estimate | None) -> tuple[Reason, ...]:
    """Names the gain of the plan that dstrain would choose over the requested one, if it is faster."""
    gain = gain_ratio(cluster, other, chosen) if other is not None else None
    if other is None or gain is None or gain <= EQUAL_RATIO:
        return ()
    mine, open_ = flat(chosen.configuration), flat(other.configuration)
    names = [name for name in SPEED if getattr(request, name) is not None and mine[name] != open_[name]]
    asked, without = " ".join(option(request, name) for name in names), "it" if len(names) == 1 else "them"
    text = f"{asked}, as asked; without {without}, {label(other.configuration)} would be {faster(gain)} and fits"
    return (Reason(topic=Topic.AS_ASKED, text=text),)


def _eight_bit(cluster: Cluster, request: Request, chosen: Estimate, other: Estimate | None) -> tuple[Reason, ...]:
    """Names the gain of 8-bit AdamW on the GPU over an offloaded optimizer."""
    gain = gain_ratio(cluster, other, chosen) if other is not None else None
    if other is None or other.speed is None or gain is None:
        return ()
    words, rate = OPTIMIZER_WORDS[other.configuration.step.optimizer], other.speed.tokens_per_s_per_gpu
    # an offload that was asked for goes with AdamW alone
    typed = "--offload none " if request.offload is not None else ""
    text = (
        f"{words} without offload would be {faster(gain)} and fits ({label(other.configuration)}:"
        f" {rate:,.0f} tokens a second on each GPU, {format_bytes(other.memory.device_bytes_per_gpu)}); it rounds the"
        f" moments: {typed}--optimizer {other.configuration.step.optimizer}"
    )
    return (Reason(topic=Topic.OFFLOAD, text=text),)


def faster(gain: float) -> str:
    """Returns a gain in words.

    >>> faster(0.07), faster(-0.2), faster(1.5)
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
    parts = [(name, seconds / known.step_s) for name, seconds in known.parts_s.items() if seconds > 0]
    parts = [part for part in parts if LIMITS[part[0]] is known.limited_by or part[1] >= LEAST_OTHER_SHARE]
    parts.sort(key=lambda part: (LIMITS[part[0]] is not known.limited_by, -part[1]))
    kinds = groupby(parts[:MOST_SENTENCES], key=lambda part: LIMITS[part[0]] is known.limited_by)
    most = "; ".join(", ".join(f"{name} {percent(share)}" for name, share in kind) for _, kind in kinds)
    text = (
        f"a step takes {format_seconds(known.step_s)} (± {percent(known.uncertainty_ratio)}):"
        f" {known.tokens_per_s_per_gpu:,.0f} tokens a second on each GPU, MFU {percent(known.mfu_ratio)}; limited"
        f" by {known.limited_by}{f' ({most})' if most else ''}"
    )
    return [Reason(topic=Topic.SPEED, text=text)]


def _over(cluster: Cluster, chosen: Estimate, others: list[Neighbour]) -> list[Reason]:
    """Returns each choice with the closest alternative that it beat and the margin, closest decisions first; a plan is
    an alternative once."""
    said = []
    for neighbour in others:
        gain = gain_ratio(cluster, chosen, neighbour.best) if neighbour.best is not None else None
        if neighbour.best is None or gain is None:
            continue
        memory = _more_bytes(chosen, neighbour.best)
        whole = "" if neighbour.is_only_difference else f" ({label(neighbour.best.configuration)})"
        is_smaller = chosen.memory.device_bytes_per_gpu < neighbour.best.memory.device_bytes_per_gpu
        if gain >= -EQUAL_RATIO or is_smaller:
            speed = faster(gain) if abs(gain) > EQUAL_RATIO else "as fast"
            text = f"{neighbour.chosen} over {neighbour.other}{whole}: {speed}, {memory}"
            said.append((abs(gain), text, neighbour.topic, whole))
    closest: dict[str, Reason] = {}
    for _, text, topic, whole in sorted(said):
        if topic not in {reason.topic for reason in closest.values()}:
            closest.setdefault(whole or text, Reason(topic=topic, text=text))
    return list(closest.values())


def _with_more(cluster: Cluster, chosen: Estimate, others: list[Neighbour]) -> list[Reason]:
    """Names the changes that more memory would allow: the nearest change, and those that need more and bring more."""
    said, best = [], 0.0
    for neighbour in faster_but_too_large(cluster, chosen, others):
        gain = gain_ratio(cluster, neighbour.estimate, chosen)
        if gain is not None and gain < best + EQUAL_RATIO:
            continue
        best = gain or 0.0
        where = "per GPU" if not neighbour.estimate.fits_gpu else "of host RAM on each node"
        would = "would fit" if gain is None else f"would be {faster(gain)}"
        more = format_bytes(missing_bytes(neighbour.estimate))
        text = f"with {more} more {where}, the same with {neighbour.other} {would}"
        said.append(Reason(topic=neighbour.topic, text=text))
    return said[:MOST_SENTENCES]


def _memory(workload: Workload, chosen: Estimate) -> list[Reason]:
    """Names the trained parameters, the states on each GPU, the peak, and host RAM."""
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
        if waiting := cluster.gpus_per_node * waiting_bytes(model, configuration):
            when += f"; in training layers' inputs take {format_bytes(waiting)} of it"
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
