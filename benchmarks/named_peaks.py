"""Activation memory of any configuration at named instants on the tape, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers import context, recording
from dstrain.plan.memory.layers.context import Variant
from dstrain.plan.memory.layers.tape import END, GradRelease, Key, Moment

_BACKWARD = ("recompute", "recompute end", "backward", "after")
"""Phases of a linear layer in the backward pass of its decoder layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The peak of live bytes beyond parameters at one named instant, by part."""

    name: str
    """`forward`, `loss forward`, `router loss forward`, `loss backward`, `head backward`, `layer backward` or
    `embedding backward`."""
    activations: int
    """Saved tensors, working tensors, and their gradients."""
    logits: int
    """Logits and the copies of the loss."""
    grads: int
    """Gradients of parameters: the one just made, and those kept."""
    layers_done: int
    """Layers whose backward pass is over."""
    gathered: int
    """Parameters of the module at work, under ZeRO-3."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.activations + self.logits + self.grads + self.gathered


def variant_of(configuration: Configuration) -> Variant:
    """Returns the settings of the tape if autograd keeps gradients, and modules gather parameters themselves.

    FSDP holds each layer's input and its gradient to the end if weights are frozen.
    """
    c, is_sharded = configuration, configuration.zero.stage == 3
    gathers = is_sharded and c.code.sharding is None
    return replace(
        context.variant_of(c),
        release=_release(c),
        gathers=gathers,
        keeps_inputs=gathers,
        stops_early=c.code.stops_early,
        holds_layers=is_sharded and c.code.has_fp32_adapters and not c.model.is_full,
    )


def _release(configuration: Configuration) -> GradRelease:
    """Returns how long autograd keeps gradients; later micro-batches add to the first one's."""
    if configuration.zero.stage <= 1 and not configuration.zero.is_offloaded:
        return GradRelease.AT_STEP if configuration.step.grad_accum == 1 else GradRelease.AT_ONCE
    return GradRelease.AT_ONCE if configuration.code.sharding is None else GradRelease.AFTER_LAYER


def profile(model: ModelFacts, configuration: Configuration) -> tuple[Instant, ...]:
    """Returns the peak of each named instant of one micro-batch, for the whole depth of the model."""
    return of_variant(model, variant_of(configuration))


@cache
def of_variant(model: ModelFacts, variant: Variant) -> tuple[Instant, ...]:
    """Returns the peaks on the tape; the backward passes of layers at either end of a kind are instants of their own.

    Between them the peak follows a straight line, so one of the two is the largest.
    """
    moments = recording.brief(model, variant, variant.checkpointing.period).moments
    return tuple(
        _instant(name, layer, parts, model.num_hidden_layers) for (name, layer), parts in by_name(moments).items()
    )


def by_name(moments: Iterable[Moment]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Returns the peak of each instant by its name and, in the backward pass of a layer, by the layer (else -1)."""
    highest: dict[tuple[str, int], tuple[int, ...]] = {}
    for moment in moments:
        name = _named(moment.key)
        if moment.key != END and sum(moment.peak) > sum(highest.get(name, (-1,))):
            highest[name] = moment.peak
    return highest


def _named(key: Key) -> tuple[str, int]:
    what, layer, _ = key
    if what in _BACKWARD:
        what = "layer backward"
    return (what, layer) if what == "layer backward" else (what.removesuffix(" end"), -1)


def _instant(name: str, layer: int, parts: tuple[int, ...], layers: int) -> Instant:
    activations, logits, grads, gathered = parts
    done = layers if name in ("embedding backward", "vision backward") else 0
    if layer >= 0:
        done = layers - 1 - layer
    return Instant(name=name, activations=activations, logits=logits, grads=grads, gathered=gathered, layers_done=done)
