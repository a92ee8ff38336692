"""The tape's bytes between the points where the engine acts: the start and end of each module's passes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.memory.layers.activations import layer_kinds, play
from dstrain.plan.memory.layers.context import Context, Variant
from dstrain.plan.memory.layers.graph import OFFLOADED_IN_FLIGHT, Tape
from dstrain.plan.memory.layers.tensor import GradRelease, Ledger, Tensor

LAYERS_PLAYED = 3
"""Layers of each kind on the tape: the first, one in the middle, the last. Saved bytes grow evenly between them; where
layer inputs leave the GPU, after as many more as are on their way."""

Key = tuple[str, int, str]
"""What begins (`forward`, `forward end`, `recompute`, `recompute end`, `backward`, `after`), its layer (-1: outside of
the layers) and the module; or an instant of the tape with layer and an empty name."""


Kinds = tuple[tuple[str, int, int], ...]
"""Kinds of layers: name, layers of the model, layers that were played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The layers and linear layers that a micro-batch runs through."""

    kinds: Kinds
    """The kinds of layers, in order."""
    linears: tuple[tuple[str, int], ...]
    """Linear layers inside the decoder layers in order of their first call → elements of the weight on one rank."""
    detached: frozenset[str]
    """Linear layers of the first decoder layer whose input needs no gradient, as below the first adapter."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The time from one mark to the next, in bytes by part of the tape."""

    key: Key
    """The mark."""
    begin: tuple[int, ...]
    """Live at the mark."""
    peak: tuple[int, ...]
    """The most that is live until the next mark."""


@dataclass(frozen=True, slots=True)
class Moments:
    """One micro-batch on the tape."""

    played: tuple[Moment, ...]
    """In order of time, with the layers that were played."""
    anatomy: Anatomy
    """What the engine acts on."""
    kept: tuple[int, ...]
    """Bytes that a layer of each kind keeps from forward to backward."""


class Marks(Ledger):
    """A ledger that remembers every mark in order, with what was live."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[Key, tuple[int, ...]]] = []

    def enter(self, instant: str | Key) -> None:
        key = instant if isinstance(instant, tuple) else key_of(instant)
        self.marks.append((key, tuple(self.parts)))
        super().enter(str(len(self.marks) - 1))

    def moments(self) -> tuple[Moment, ...]:
        """Returns what lived, mark by mark."""
        return tuple(Moment(key, begin, self.peaks[str(index)]) for index, (key, begin) in enumerate(self.marks))


def key_of(instant: str) -> Key:
    name, _, number = instant.rpartition(" ")
    return (name, int(number), "") if number.isdigit() else (instant, -1, "")


class MarkedContext(Context):
    """Layer code's context that marks where linear layers begin and end."""

    __slots__ = ("_first", "_layer", "_marks", "sizes")

    def __init__(self, model: ModelFacts, variant: Variant, tape: Tape, marks: Marks) -> None:
        super().__init__(model, variant, tape)
        self._marks = marks
        self._first = ""
        self._layer = -1
        self.sizes: dict[str, int] = {}

    def linear(self, x: Tensor, name: str, *, shards: str = "") -> Tensor:
        if name.startswith("model.") or name == "lm_head":
            return super().linear(x, name, shards=shards)
        again = self.tape.is_recomputing
        if not again:
            self._first = self._first or name
            self._layer += name == self._first
        layer, direction = self._layer, "recompute" if again else "forward"
        shape = self.linears[name]
        self.sizes.setdefault(name, shape.outputs * shape.inputs // (self.variant.parallel.tp if shards else 1))
        self._marks.enter((direction, layer, name))
        result = super().linear(self._marked(x, ("after", layer, name)), name, shards=shards)
        self._marks.enter((f"{direction} end", layer, name))
        return self._marked(result, ("backward", layer, name))

    def _marked(self, x: Tensor, key: Key) -> Tensor:
        """Passes x through; marks the moment when its gradient comes back."""
        if x.node is None:
            return x

        def backward(grad: Tensor) -> tuple[Tensor | None, ...]:
            self._layer = key[1]
            self._marks.enter(key)
            return (grad,)

        return Tensor(x.storage, x.numel, x.item, self.tape.node((x,), backward))


@cache
def moments(model: ModelFacts, variant: Variant, is_reentrant: bool, keeps_inputs: bool) -> Moments:
    """Returns a micro-batch's moments; gradients of parameters leave the tape as soon as they are made."""
    depth = layer_kinds(model, variant)
    most = LAYERS_PLAYED + (OFFLOADED_IN_FLIGHT if variant.checkpointing.offload else 0)
    is_even = variant.checkpointing.period == 1  # else what layers keep does not grow evenly, and all are played
    played = {kind: min(count, most) if is_even else count for kind, count in depth.items()}
    tape = Tape(release=GradRelease.AT_ONCE)
    tape.offloads_inputs = variant.checkpointing.offload
    tape.stops_early = variant.code.stops_early and not is_reentrant
    tape.keeps_inputs = keeps_inputs
    marks = Marks()
    tape.ledger = marks
    run = MarkedContext(model, variant, tape, marks)
    play(run, played)
    found = marks.moments()
    return Moments(
        played=found,
        anatomy=Anatomy(
            kinds=tuple((kind, depth[kind], played[kind]) for kind in depth),
            linears=tuple(run.sizes.items()),
            detached=_detached(found),
        ),
        kept=_kept(found, list(played.values())),
    )


def _detached(found: tuple[Moment, ...]) -> frozenset[str]:
    keys = {moment.key for moment in found}
    first = {name for what, layer, name in keys if what == "forward" and layer == 0}
    return frozenset(name for name in first if ("after", 0, name) not in keys)


def _kept(found: tuple[Moment, ...], played: list[int]) -> tuple[int, ...]:
    """Returns what a layer of each kind keeps: by how much more is live when the next one begins."""
    begins = {key[1]: sum(moment.begin) for moment in reversed(found) if (key := moment.key)[0] == "forward" and key[2]}
    kept, first = [], 0
    for count in played:
        last = first + count - 1
        kept.append(begins[last] - begins[last - 1] if count > 1 else 0)
        first += count
    return tuple(kept)
