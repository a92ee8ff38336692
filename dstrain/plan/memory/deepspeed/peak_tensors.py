"""Lists the tensors of a micro-batch that live at the predicted peak, by the module that allocates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from operator import attrgetter

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.oom import NamedTensors
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.deepspeed.engine import instants, recorded
from dstrain.plan.memory.deepspeed.replay import STEP, Instant
from dstrain.plan.memory.layers.recording import Recording
from dstrain.plan.memory.layers.tape import Key

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
