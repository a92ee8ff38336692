"""Live bytes under DeepSpeed: the tape's moments plus the engine's levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.deepspeed.byte_account import Parts
from dstrain.plan.memory.deepspeed.candidate_moments import Candidate, CandidateMoments, course, slots
from dstrain.plan.memory.deepspeed.host_memory import Host, host
from dstrain.plan.memory.deepspeed.modules import QUANTIZED_PER_ELEMENT, Modules, Shape
from dstrain.plan.memory.deepspeed.moments import Anatomy, Key, Moments, moments
from dstrain.plan.memory.deepspeed.optimizer_step import step_bytes
from dstrain.plan.memory.deepspeed.program import Passes, Program, program
from dstrain.plan.memory.deepspeed.replay import replays
from dstrain.plan.memory.deepspeed.resident import Resident, resident
from dstrain.plan.memory.deepspeed.settings import Settings, settings_of
from dstrain.plan.memory.deepspeed.shorten_model import shortened
from dstrain.plan.memory.layers.context import variant_of
from dstrain.plan.memory.layers.tensor import GradRelease
from dstrain.plan.memory.params import quantized_bytes_per_param, trained
from dstrain.plan.memory.peak import Peak


@dataclass(frozen=True, slots=True)
class Instant:
    """Live bytes beyond what is resident at one moment."""

    key: Key
    """The moment."""
    tape: tuple[int, ...]
    """The tape's bytes: activations, logits, gradients just made, nothing gathered."""
    engine: Parts
    """The engine's: gradients, buffers, gathered."""

    @property
    def name(self) -> str:
        """What the moment is called."""
        return NAMES.get(self.key[0], "layer backward")

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.tape) + sum(self.engine)


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """What the engine does with a model, whatever a micro-batch is."""

    held: Resident
    """What it holds between steps."""
    course: CandidateMoments
    """What it adds in forward and backward."""
    step: tuple[Parts, ...]
    """What it adds in the optimizer step."""


def peak(model: ModelFacts, configuration: Configuration, num_ranks: int, *, kernel_workspaces: bool = True) -> Peak:
    """Returns the peak of live bytes of the rank that has most, without workspaces of kernel libraries.

    `num_ranks` share the optimizer: all GPUs, those that share sequences too, but tensor-parallel ones count once.
    `kernel_workspaces` says whether what GPU kernels allocate inside is counted, which CPU ranks do not have.
    Source: live storages of DeepSpeed 0.19.8 on two and four CPU ranks; `benchmarks/engine.py` compares.
    """
    held = engine_of(model, configuration, num_ranks).held
    found = instants(model, configuration, num_ranks, kernel_workspaces=kernel_workspaces)
    top = max(found, key=lambda instant: instant.total)
    grads, buffers, gathered = top.engine
    activations, logits, made, _ = top.tape
    return Peak(
        name=top.name,
        params=held.params,
        grads=held.grads + made + grads,
        optimizer=held.optimizer,
        buffers=held.buffers + buffers,
        gathered=held.gathered + gathered,
        activations=activations,
        logits=logits,
    )


NAMES = {
    "forward": "forward",
    "forward end": "forward",
    "head forward": "forward",
    "loss forward": "loss forward",
    "loss backward": "loss backward",
    "head backward": "head backward",
    "embedding backward": "embedding backward",
    "backward end": "gradient reduction",
    "optimizer step": "optimizer step",
}
"""What a moment is called; all others are of a layer's backward pass."""


_ABOVE_LAYERS = ("head forward", "loss forward", "loss backward", "head backward")
"""Moments outside of the layers at which all layers keep what they saved."""


def instants(
    model: ModelFacts, configuration: Configuration, num_ranks: int, *, kernel_workspaces: bool = True
) -> Iterator[Instant]:
    """Yields the moments of a step that may be the peak."""
    found = engine_of(model, configuration, num_ranks)
    tape = played(model, configuration, kernel_workspaces=kernel_workspaces)
    nothing = (0, 0, 0, 0)
    now = None
    for moment in tape.played:
        at = found.course.at.get(moment.key, now and (now[1], now[1]))
        if at is None:
            continue
        now = at
        before, kept = _short(tape, moment.key)
        for parts, candidates in ((moment.begin, at[0]), (moment.peak, at[1])):
            yield _largest(moment.key, parts, candidates, before, kept)
    for _, _, parts in found.course.end:
        yield Instant(("backward end", -1, ""), nothing, parts)
    for parts in found.step:
        yield Instant(("optimizer step", -1, ""), nothing, parts)


def _largest(key: Key, parts: tuple[int, ...], candidates: tuple[Candidate, ...], before: int, kept: int) -> Instant:
    short, _, engine = max(candidates, key=lambda candidate: candidate[0] * kept + candidate[1])
    return Instant(key, (parts[0] + before + short * kept, *parts[1:]), engine)


def _short(tape: Moments, key: Key) -> tuple[int, int]:
    """Returns the bytes that layers not played keep below a moment, and what each further layer of its kind adds."""
    what, layer, _ = key
    missing = [(depth - count) * kept for (_, depth, count), kept in zip(tape.anatomy.kinds, tape.kept, strict=True)]
    if layer < 0:
        return (sum(missing) if what in _ABOVE_LAYERS else 0), 0
    start = 0
    for index, (_, _, count) in enumerate(tape.anatomy.kinds):
        if layer < start + count:
            return sum(missing[:index]), tape.kept[index]
        start += count
    raise ValueError(key)


def played(model: ModelFacts, configuration: Configuration, *, kernel_workspaces: bool = True) -> Moments:
    """Returns the tape's moments."""
    variant = variant_of(configuration)
    variant = replace(variant, release=GradRelease.AT_ONCE, gathers=False, kernel_workspaces=kernel_workspaces)
    is_reentrant = settings_of(configuration).is_reentrant
    return moments(model, variant, is_reentrant, configuration.zero.stage == 3)


def engine_of(model: ModelFacts, configuration: Configuration, num_ranks: int) -> Engine:
    """Returns what the engine does with a model on ranks that share the optimizer."""
    return _engine(model, settings_of(configuration), num_ranks, played(model, configuration).anatomy)


@cache
def _engine(model: ModelFacts, settings: Settings, ranks: int, anatomy: Anatomy) -> Engine:
    modules = programmed(model, settings, anatomy).modules
    held = _held(model, settings, ranks, modules)
    short = model
    if settings.zero.stage == 3:
        _, depth, count = anatomy.kinds[-1]
        short = shortened(model, settings.zero, most=depth - count)
    program = programmed(short, settings, anatomy)
    played_ranks = replays(program, settings, ranks)
    # small parameters of ZeRO-3 are given back before the step
    gathered = held.secondary - held.gathered
    step = {
        (grads, buffers, gathered)
        for each in played_ranks
        for grads, buffers in step_bytes(modules, settings, ranks, each.rank, each.kept)
    }
    left_out = model.num_hidden_layers - short.num_hidden_layers
    return Engine(held, course(played_ranks, slots(program, anatomy.kinds, left_out)), tuple(step))


def _held(model: ModelFacts, settings: Settings, ranks: int, modules: Modules) -> Resident:
    """Returns what is resident, with the scales of quantised weights: they are no parameters, so each rank has all."""
    held = resident(modules, settings, ranks)
    scales = quantized_bytes_per_param(settings.model.double_quant) - 2 / QUANTIZED_PER_ELEMENT
    quantized = trained(model, settings.model.method, settings.model.lora).quantized
    return replace(held, params=held.params + round(scales * quantized))


def host_of(model: ModelFacts, configuration: Configuration, num_ranks: int) -> Host:
    """Returns what the rank with most keeps in host RAM and on NVMe."""
    return _host(model, settings_of(configuration), num_ranks, played(model, configuration).anatomy)


@cache
def _host(model: ModelFacts, settings: Settings, ranks: int, anatomy: Anatomy) -> Host:
    modules = programmed(model, settings, anatomy).modules
    return max((host(modules, settings, ranks, rank) for rank in {0, ranks - 1}), key=lambda memory: memory.taken)


def programmed(model: ModelFacts, settings: Settings, anatomy: Anatomy) -> Program:
    """Returns the program of a micro-batch."""
    trained_model = settings.model
    shape = Shape(
        method=trained_model.method, lora=trained_model.lora, linears=anatomy.linears, tp=settings.parallel.tp
    )
    passes = Passes(checkpointing=settings.checkpointing, is_reentrant=settings.is_reentrant, detached=anatomy.detached)
    return program(model, shape, passes)
