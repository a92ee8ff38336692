"""Traces a run of PyTorch on one GPU or under DDP: every rank holds everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.named_peaks import variant_of
from benchmarks.published.pytorch.element_sizes import Elements, Script, elements, step
from benchmarks.published.pytorch.weights import Weight, weights
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Event
from dstrain.plan.memory.layers.context import Variant
from dstrain.plan.memory.layers.recording import Recording, record
from dstrain.plan.memory.layers.tape import GradRelease, TapeEvent
from dstrain.units import MIB

DDP_BUCKET_BYTES = 25 * MIB
"""Gradients that DDP reduces at once. Source: torch 2.13 nn/parallel/distributed.py: bucket_cap_mb."""


def steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int
) -> Iterator[list[Event]]:
    """Yields the events before the first step, then those of each step."""
    sizes = elements(configuration)
    script = Script()
    all_weights = weights(model, configuration.model, configuration.code).in_order
    trained = [weight for weight in all_weights if weight.trains]
    script.allocate_all(sizes.frozen_bytes(weight) for weight in all_weights if not weight.trains)
    script.allocate_all(weight.numel * sizes.trained for weight in trained)
    if num_ranks > 1:
        script.allocate_all(_buckets(trained, sizes))
    script.allocate(workspace_bytes)
    yield script.take()
    share = num_ranks if configuration.zero.stage else 1
    groups = [[weight.numel / share for weight in trained if weight.decays is decays] for decays in (True, False)]
    first, later = _micro_batches(model, configuration)
    is_first = True
    while True:
        _micro_batch(script, first, workspace_bytes if is_first else 0)
        if later is not None:
            script.events += later.events
            script.events += later.freed
        step(script, groups, sizes, is_first=is_first)
        script.events += first.freed
        is_first = False
        yield script.take()


def _micro_batches(model: ModelFacts, configuration: Configuration) -> tuple[Recording, Recording | None]:
    """Returns the first micro-batch of a step and, if a step has more, one that adds to its gradients."""
    first = record(model, plain_variant(configuration, GradRelease.AT_STEP))
    if configuration.step.grad_accum == 1:
        return first, None
    return first, _renamed(record(model, plain_variant(configuration, GradRelease.AT_ONCE)))


def _renamed(recording: Recording) -> Recording:
    """Returns the recording with other ids, so that tensors that another one leaves may still be there."""
    events: list[TapeEvent] = [(("again", key), size) for key, size in recording.events]
    freed: list[TapeEvent] = [(("again", key), size) for key, size in recording.freed]
    return replace(recording, events=events, freed=freed)


def _micro_batch(script: Script, recording: Recording, workspace_bytes: int) -> None:
    """Writes a micro-batch; the thread that goes backward has a workspace of its own, from its first product on."""
    place = recording.place_of("head backward")
    script.events += recording.events[:place]
    script.allocate(workspace_bytes)
    script.events += recording.events[place:]


def _buckets(trained: list[Weight], sizes: Elements) -> Iterator[float]:
    """Yields the bytes of DDP's buckets, filled from the last tensor on."""
    filled = 0
    for weight in reversed(trained):
        filled += weight.numel * sizes.trained
        if filled >= DDP_BUCKET_BYTES:
            yield filled
            filled = 0
    yield filled


def plain_variant(configuration: Configuration, release: GradRelease) -> Variant:
    """Returns the settings of the tape for PyTorch alone."""
    return replace(variant_of(configuration), release=release)
