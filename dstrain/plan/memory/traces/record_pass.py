"""Records a micro-batch on the tape.

A few layers are played. The others are written by repeating one of them: layers in the middle ask for the same blocks
in the same order. Where the allocator may grow its segments, what such a layer takes and gives back itself is left out:
it finds the blocks of the layer before it. Without that a hole more or less matters, and nothing is left out.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.deepspeed.moments import MarkedContext
from dstrain.plan.memory.layers.activations import play
from dstrain.plan.memory.layers.context import Variant, variant_of
from dstrain.plan.memory.layers.graph import Tape
from dstrain.plan.memory.layers.tensor import GradRelease
from dstrain.plan.memory.traces.extend_layers import repeated
from dstrain.plan.memory.traces.recording import MarkedEvents, Recording

EDGE = 3
"""Layers at each end that are written out as they were played. The first is unlike the others where its input needs no
gradient; the others are there because layers free what their neighbours made."""
RECORDINGS_KEPT = 8
"""Recordings that are not made anew; one is about a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How a micro-batch is run beside what a configuration's variant says."""

    release: GradRelease
    """How long autograd keeps gradients of parameters."""
    stops_early: bool
    """Whether a recomputation ends when all that was saved is there again."""
    keeps_inputs: bool = False
    """Whether linear layers keep what they multiply even where the weight is frozen, as ZeRO-3 has it."""


def record(model: ModelFacts, configuration: Configuration, passes: Passes) -> Recording:
    """Returns a micro-batch at the whole depth of the model."""
    variant = replace(variant_of(configuration), release=passes.release, gathers=False)
    return _recorded(model, variant, passes, configuration.expandable_segments)


def plain_passes(configuration: Configuration, release: GradRelease) -> Passes:
    """Returns how PyTorch alone runs one."""
    return Passes(release=release, stops_early=configuration.code.stops_early)


@lru_cache(RECORDINGS_KEPT)
def _recorded(model: ModelFacts, variant: Variant, passes: Passes, is_terse: bool) -> Recording:
    sparse = model.moe.num_moe_layers if model.moe else 0
    depth = {"dense": model.num_hidden_layers - sparse, "sparse": sparse}
    depth = {kind: count for kind, count in depth.items() if count}
    longest = max(depth, key=lambda kind: depth[kind])
    more = depth[longest] - 2 * EDGE
    if more > 0 and variant.checkpointing.period == 1:
        short = _played(model, variant, {**depth, longest: 2 * EDGE}, passes)
        first = 0 if longest == next(iter(depth)) else model.num_hidden_layers - depth[longest]
        found = repeated(short, first + EDGE - 1, more, is_terse=is_terse)
        if found is not None and _is_sound(found):
            return found
    return _played(model, variant, depth, passes)


def _is_sound(found: Recording) -> bool:
    """Returns whether nothing is allocated twice: where tensors outlive their layer, layers do not repeat."""
    held: set[Hashable] = set()
    for key, size in found.events:
        if size and key in held:
            return False
        (held.add if size else held.discard)(key)
    return True


def _played(model: ModelFacts, variant: Variant, depth: dict[str, int], passes: Passes) -> Recording:
    tape = Tape(release=variant.release)
    tape.offloads_inputs = variant.checkpointing.offload
    tape.stops_early = passes.stops_early
    tape.keeps_inputs = passes.keeps_inputs
    tape.ledger = ledger = MarkedEvents()
    play(MarkedContext(model, variant, tape, ledger), depth)
    events = ledger.take()
    tape.grads.clear()
    tape.held.clear()
    return Recording(events, ledger.places, ledger.take())
