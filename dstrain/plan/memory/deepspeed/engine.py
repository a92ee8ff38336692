"""Live bytes under DeepSpeed: the tape's moments, what the engine allocates between them, and the peak's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from operator import attrgetter

from dstrain.choices import Method
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.oom import NamedTensors
from dstrain.plan.configuration import DEFAULTS, Configuration, Parallel
from dstrain.plan.memory.deepspeed.gradients import layout
from dstrain.plan.memory.deepspeed.modules import QUANTIZED_PER_ELEMENT, Modules, Shape, modules
from dstrain.plan.memory.deepspeed.program import MicroBatch, Passes, program
from dstrain.plan.memory.deepspeed.replay import STEP, Engine, Instant, highest, instants_of, replay
from dstrain.plan.memory.deepspeed.settings import Settings, settings_of
from dstrain.plan.memory.deepspeed.states import Host, Resident, host, resident, step
from dstrain.plan.memory.deepspeed.timeline import rounded, spans
from dstrain.plan.memory.layers import recording
from dstrain.plan.memory.layers.context import variant_of
from dstrain.plan.memory.layers.recording import Recording
from dstrain.plan.memory.layers.tape import Key
from dstrain.plan.memory.params import NF4_SCALE_BYTES_PER_PARAM, is_inside, shard, trained
from dstrain.plan.memory.peak import Peak
from dstrain.plan.training_code import needs_reentrant

SHORT_SEQ_LEN = 16
"""Tokens of the micro-batch that is recorded where only the model's modules are of interest."""
PEAKS_KEPT = 256
"""Number of cached peaks: a search asks for one before it replays the allocator, and again for the choice."""


@lru_cache(PEAKS_KEPT)
def brief_peak(
    model: ModelFacts, configuration: Configuration, num_ranks: int, *, kernel_workspaces: bool = True
) -> Peak:
    """Returns `peak` from the moments of a micro-batch alone; under ZeRO-3 from a few layers at each end.

    Gathered parameters and waiting buckets are the same in all layers between them. Below ZeRO-3 gradients pile up from
    layer to layer.
    """
    edge = _edge(model, configuration) if configuration.zero.stage == 3 else None
    variant = variant_of(configuration, kernel_workspaces=kernel_workspaces)
    brief = recording.brief(model, variant, edge)
    layers = None if edge is None else recording.run_at_edges(model, variant, edge)
    micro_batch = _programmed(model, configuration, brief, layers)
    engine = _engine(model, micro_batch, settings_of(configuration), num_ranks)
    return highest(engine, brief, overlaps=configuration.zero.overlap_comm)


def _edge(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the layers that prefetching may run ahead, and a few more."""
    layer = sum(g.numel * g.count for g in model.tensors if is_inside(g)) // model.num_hidden_layers
    if configuration.model.method is Method.QLORA:
        layer //= QUANTIZED_PER_ELEMENT
    ahead = configuration.zero.max_live_parameters + configuration.zero.prefetch_bucket_size
    return recording.BRIEF_EDGE + ahead // max(1, layer)


@lru_cache(PEAKS_KEPT)
def peak(model: ModelFacts, configuration: Configuration, num_ranks: int, *, kernel_workspaces: bool = True) -> Peak:
    """Returns the highest peak of live bytes of any rank, without workspaces of kernel libraries.

    `num_ranks` share the optimizer: all GPUs, those that share sequences too, but tensor-parallel ones count once.
    `kernel_workspaces` says whether what GPU kernels allocate inside is counted, which CPU ranks do not have.
    Source: live storages of DeepSpeed 0.19.8 on two and four CPU ranks; `benchmarks/engine.py` compares.
    """
    recording = recorded(model, configuration, kernel_workspaces=kernel_workspaces)
    engine = engine_of(model, configuration, num_ranks)
    return highest(engine, recording, overlaps=configuration.zero.overlap_comm)


def instants(
    model: ModelFacts, configuration: Configuration, num_ranks: int, *, kernel_workspaces: bool = True
) -> Iterator[Instant]:
    """Yields the moments of a step that may be the peak."""
    recording = recorded(model, configuration, kernel_workspaces=kernel_workspaces)
    yield from instants_of(engine_of(model, configuration, num_ranks), recording)


def recorded(model: ModelFacts, configuration: Configuration, *, kernel_workspaces: bool = True) -> Recording:
    """Returns a micro-batch on the tape, whose gradients go as soon as they are made: the engine takes them."""
    return recording.record(model, variant_of(configuration, kernel_workspaces=kernel_workspaces))


def engine_of(model: ModelFacts, configuration: Configuration, num_ranks: int) -> Engine:
    """Returns the engine's bytes for a model on ranks that share the optimizer."""
    micro_batch = _programmed(model, configuration, recorded(model, configuration))
    return _engine(model, micro_batch, settings_of(configuration), num_ranks)


@cache
def _engine(model: ModelFacts, micro_batch: MicroBatch, settings: Settings, ranks: int) -> Engine:
    between = _resident(model, settings, ranks, micro_batch.modules)
    between = replace(between, gathered=between.gathered + _secondary_elsewhere(micro_batch, settings, ranks))
    played = replay(micro_batch, settings, ranks)
    # small parameters of ZeRO-3 are given back before the step
    gathered = between.secondary - between.gathered
    steps = [step(micro_batch.modules, settings, ranks, rank, between.late) for rank in played.ranks]
    every = [
        (*of_rank, spans(events, [len(events)], begin=(kept, 0, gathered))[0])
        for of_rank, events, kept in zip(played.spans, steps, played.kept, strict=True)
    ]
    return Engine(between, played, tuple(every), steps[0])


def _secondary_elsewhere(micro_batch: MicroBatch, settings: Settings, ranks: int) -> int:
    """Returns ZeRO++'s secondary partitions of layers that are not run, as if they were there from the beginning."""
    zero, item = settings.zero, settings.model.item
    if zero.hpz < 2 or len(micro_batch.layers) == len(micro_batch.modules.layers):
        return 0
    weights = micro_batch.modules.weights
    others = Counter(micro_batch.modules.counted)
    others.subtract(weights[number] for number in {number for members in micro_batch.members for number in members})
    large = ((weight, count) for weight, count in others.items() if weight.numel > zero.param_persistence_threshold)
    return sum(count * (rounded(weight.padded(ranks) * item) // zero.hpz) for weight, count in large)


def _resident(model: ModelFacts, settings: Settings, ranks: int, all_modules: Modules) -> Resident:
    """Returns the resident states, with the scales of quantised weights: no parameters, so each rank has all."""
    parameters = resident(all_modules, settings, ranks)
    quantized = trained(model, settings.model.method, settings.model.lora).quantized
    return replace(parameters, params=parameters.params + round(NF4_SCALE_BYTES_PER_PARAM * quantized))


def host_of(model: ModelFacts, configuration: Configuration, num_ranks: int) -> Host:
    """Returns the host RAM and NVMe bytes of the rank with the most.

    They depend on the parameters and on how ZeRO divides them, whatever a micro-batch holds.
    """
    if not configuration.zero.is_offloaded:
        return Host()
    all_modules, settings = _alone(model, configuration)
    return _host(all_modules, settings, num_ranks)


def resident_of(model: ModelFacts, configuration: Configuration, num_ranks: int) -> Resident:
    """Returns the states of a rank between two steps; like `host_of` they depend on the parameters alone."""
    all_modules, settings = _alone(model, configuration)
    return _resident(model, settings, num_ranks, all_modules)


def gradients_by_rank(model: ModelFacts, configuration: Configuration, num_ranks: int) -> list[int]:
    """Returns the elements of gradient that each rank of ZeRO-1 and 2 keeps for the step.

    A tensor across a cut is kept whole on both sides, because a partition refers to slices of whole gradients.
    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: get_flat_partition(return_tensor_list=True).
    """
    all_modules, _ = _alone(model, configuration)
    return layout(all_modules, num_ranks).elements_by_rank(num_ranks)


def _alone(model: ModelFacts, configuration: Configuration) -> tuple[Modules, Settings]:
    """Returns the modules, and the engine's settings without the micro-batch's."""
    parallel = replace(configuration.parallel, sp=1)
    settings = replace(settings_of(configuration), parallel=parallel)
    batch = replace(DEFAULTS.batch, seq_len=SHORT_SEQ_LEN)
    zero = replace(DEFAULTS.zero, stage=configuration.zero.stage)
    short = replace(configuration, batch=batch, zero=zero, parallel=parallel, step=DEFAULTS.step)
    return _modules(model, replace(short, checkpointing=DEFAULTS.checkpointing)), settings


@cache
def _host(all_modules: Modules, settings: Settings, ranks: int) -> Host:
    return max((host(all_modules, settings, ranks, rank) for rank in {0, ranks - 1}), key=lambda host: host.taken)


@cache
def _modules(model: ModelFacts, configuration: Configuration) -> Modules:
    sharded = shard(model, Parallel(ep=configuration.parallel.ep))
    brief = recording.brief(model, variant_of(configuration), recording.BRIEF_EDGE)
    return modules(sharded, _shape(configuration, brief))


def _programmed(
    model: ModelFacts, configuration: Configuration, recording: Recording, layers: tuple[int, ...] | None = None
) -> MicroBatch:
    """Returns the program of a micro-batch, which is the same wherever the layers' inputs wait."""
    passes = Passes(
        checkpointing=replace(configuration.checkpointing, offload=False),
        is_reentrant=needs_reentrant(configuration.model.method, configuration.zero.stage),
        detached=recording.detached,
        layers=layers,
    )
    return program(shard(model, Parallel(ep=configuration.parallel.ep)), _shape(configuration, recording), passes)


def _shape(configuration: Configuration, recording: Recording) -> Shape:
    return Shape(
        method=configuration.model.method,
        lora=configuration.model.lora,
        linears=recording.linears,
        tp=configuration.parallel.tp,
        ep=configuration.parallel.ep,
        tiled_mlp=configuration.checkpointing.tiled_mlp,
    )


_OUTSIDE = {
    "forward": "embedding",
    "vision forward": "vision tower",
    "vision forward end": "vision tower",
    "head forward": "lm_head",
    "loss forward": "loss",
    "router loss forward": "loss of routers",
    "loss backward": "loss, backward",
    "head backward": "lm_head, backward",
    "layer backward": "layer, backward",
    "vision backward": "vision tower, backward",
    "embedding backward": "embedding, backward",
}
"""Names of tensors that are allocated outside of linear layers inside the decoder layers."""
_INSIDE = {
    "forward": "{}",
    "forward end": "after {}",
    "recompute": "{}, recomputed",
    "recompute end": "after {}, recomputed",
    "backward": "{}, backward",
    "after": "after {}, backward",
}
"""The same for those in and between linear layers, with the layer's name."""


def peak_tensors(
    model: ModelFacts, configuration: Configuration, num_ranks: int, *, kernel_workspaces: bool = True
) -> tuple[NamedTensors, ...]:
    """Returns the tensors of the micro-batch at the highest peak, most bytes first; none in the optimizer step.

    They are activations, logits and gradients that were just made; the engine's own bytes are no part. Tensors of one
    size that the same module allocates in several layers are one entry. Takes the arguments of `engine.peak`; the
    model's layer code has to be on the tape.
    """
    on_gpu = kernel_workspaces
    top = max(instants(model, configuration, num_ranks, kernel_workspaces=on_gpu), key=attrgetter("total"))
    if top.key == STEP:
        return ()
    live = _live_at(recorded(model, configuration, kernel_workspaces=on_gpu), top)
    counts = Counter((_name(key), size) for key, size in live)
    ordered = sorted(counts.items(), key=lambda item: item[0][1] * item[1], reverse=True)
    return tuple(NamedTensors(name=name, size_bytes=size, count=count) for (name, size), count in ordered)


def _live_at(recording: Recording, top: Instant) -> list[tuple[Key, int]]:
    """Returns each live tensor of an instant: the moment in which it was allocated, and its bytes."""
    live: dict[Hashable, tuple[Key, int]] = {}
    for moment, following in zip(recording.moments, [*recording.moments[1:], None], strict=True):
        is_top = moment.key == top.key and top.tape in (moment.begin, moment.peak)
        total = most = sum(size for _, size in live.values())
        highest = list(live.values())
        for key, size in recording.events[moment.place : following.place if following else None]:
            if size:
                live[key] = (moment.key, size)
                total += size
            elif key in live:  # a tensor without bytes looks freed from the beginning
                total -= live.pop(key)[1]
            if is_top and top.tape == moment.peak and total > most:
                most, highest = total, list(live.values())
        if is_top:
            return highest
    return []


def _name(key: Key) -> str:
    what, _, module = key
    return _INSIDE[what].format(module) if module and what in _INSIDE else _OUTSIDE.get(what, what)
