"""Records a micro-batch on the tape.

A few layers of each kind are played. The others are written by repeating one of them, or the n of which one is
recomputed: layers in the middle ask for the same blocks in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers.activations import layer_kinds, play
from dstrain.plan.memory.layers.brief_moments import moments_at_edges, numbers_at_edges, only_layers, to_play
from dstrain.plan.memory.layers.context import Variant, variant_of
from dstrain.plan.memory.layers.extend_layers import repeated
from dstrain.plan.memory.layers.graph import Tape
from dstrain.plan.memory.layers.recording import MarkedContext, MarkedLedger, Moment, Recording
from dstrain.plan.memory.layers.tensor import GradRelease

EDGE = 3
"""Layers at each end of a kind that are written out as they were played. The first is unlike the others if its input
needs no gradient; the others are there because layers free what their neighbours made."""
BRIEF_EDGE = 2
"""Layers at each end if only peaks are needed: the first, and a typical one."""
RECORDINGS_KEPT = 24
"""Number of cached recordings; one is about a megabyte."""
BRIEF_RECORDINGS_KEPT = 256
"""The same of moments alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How a micro-batch is run beside what a configuration's variant says."""

    release: GradRelease
    """How long autograd keeps gradients of parameters."""
    stops_early: bool
    """Whether a recomputation ends when all that was saved is there again."""
    keeps_inputs: bool = False
    """Whether linear layers keep what they multiply even where the weight is frozen, as ZeRO-3 has it."""
    kernel_workspaces: bool = True
    """Whether what GPU kernels allocate inside is counted, which CPU ranks do not have."""


def record(model: ModelFacts, configuration: Configuration, passes: Passes) -> Recording:
    """Returns a micro-batch at the whole depth of the model."""
    return _recorded(model, _variant(configuration, passes), passes)


def brief(model: ModelFacts, configuration: Configuration, passes: Passes, edge: int) -> Recording:
    """Returns the moments of some layers at each end of each kind, as at the whole depth, without events."""
    return _brief(model, _variant(configuration, passes), passes, edge)


def _variant(configuration: Configuration, passes: Passes) -> Variant:
    """Returns the recording of the tape, while the engine gathers."""
    workspaces = passes.kernel_workspaces
    return replace(variant_of(configuration), release=passes.release, gathers=False, kernel_workspaces=workspaces)


@lru_cache(BRIEF_RECORDINGS_KEPT)
def _brief(model: ModelFacts, variant: Variant, passes: Passes, edge: int) -> Recording:
    depth, period = layer_kinds(model, variant), variant.checkpointing.period
    recording, short = _shallow(model, variant, passes)
    if short == depth:
        numbers = numbers_at_edges(depth, period=period, edge=edge)
        return replace(recording, moments=only_layers(recording.moments, numbers))
    moments = moments_at_edges(recording.moments, depth, short, period=period, edge=edge)
    return replace(recording, moments=moments)


@lru_cache(BRIEF_RECORDINGS_KEPT)
def _shallow(model: ModelFacts, variant: Variant, passes: Passes) -> tuple[Recording, dict[str, int]]:
    """Returns the moments of a few layers of each kind, whatever edges of the depth they stand for, and how many."""
    short = layer_kinds(model, variant)
    if not variant.kernels.router_loss:  # else each layer makes tensors there that no shallower model has
        short = to_play(short, period=variant.checkpointing.period, edge=BRIEF_EDGE)
    return replace(_played(model, variant, short, passes, all_tiles=False), events=[], freed=[]), short


def run_at_edges(model: ModelFacts, configuration: Configuration, edge: int) -> tuple[int, ...]:
    """Returns the layers of which `brief` has moments."""
    depth = layer_kinds(model, variant_of(configuration))
    return numbers_at_edges(depth, period=configuration.checkpointing.period, edge=edge)


@lru_cache(RECORDINGS_KEPT)
def _recorded(model: ModelFacts, variant: Variant, passes: Passes) -> Recording:
    depth, period = layer_kinds(model, variant), variant.checkpointing.period
    short = to_play(depth, period=period, edge=EDGE * period)
    if short == depth or variant.kernels.router_loss:
        return _played(model, variant, depth, passes)
    copies, first = {}, 0
    for kind, count in short.items():
        if depth[kind] > count:
            copies[-(-first // period) + EDGE - 1] = (depth[kind] - count) // period
        first += count
    recording = repeated(_played(model, variant, short, passes), copies, period=period)
    if recording is not None and _is_sound(recording):
        return recording
    return _played(model, variant, depth, passes)


def _is_sound(recording: Recording) -> bool:
    """Returns whether nothing is allocated twice: where tensors outlive their layer, layers do not repeat."""
    live: set[Hashable] = set()
    for key, size in recording.events:
        if size and key in live:
            return False
        (live.add if size else live.discard)(key)
    return True


def _played(
    model: ModelFacts, variant: Variant, depth: dict[str, int], passes: Passes, *, all_tiles: bool = True
) -> Recording:
    tape = Tape(release=variant.release)
    tape.plays_all_tiles = all_tiles
    tape.offloads_inputs, tape.num_in_flight = variant.checkpointing.offload, variant.code.inputs_in_flight
    tape.stops_early = passes.stops_early
    tape.keeps_inputs = passes.keeps_inputs
    tape.ledger = ledger = MarkedLedger()
    context = MarkedContext(model, variant, tape, ledger)
    play(context, depth)
    linears = tuple(context.sizes.items())
    del context  # with the tables and masks that it refers to
    moments, events = ledger.moments(), ledger.take()
    tape.grads.clear()
    tape.kept_tensors.clear()
    return Recording(events, ledger.take(), moments, linears, _detached(moments))


def _detached(moments: list[Moment]) -> frozenset[str]:
    keys = {moment.key for moment in moments}
    first = {name for what, layer, name in keys if what == "forward" and layer == 0}
    return frozenset(name for name in first if ("after", 0, name) not in keys)
