"""Records the allocations and frees of one micro-batch on the tape, and what lives at every mark between them.

A few layers of each kind are played. The others are written by repeating one of them, or one period if one layer in n
is recomputed: layers in the middle ask for the same blocks in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import add

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traces import Peak
from dstrain.plan.memory.layers import ops, vision
from dstrain.plan.memory.layers.activations import layer_kinds, play
from dstrain.plan.memory.layers.context import Context, Variant
from dstrain.plan.memory.layers.tape import END, Key, Moment, Part, Tape, TapeEvent, Tensor
from dstrain.plan.memory.params import is_inside, shard


@dataclass(frozen=True, eq=False)
class Recording:
    """One micro-batch at the whole depth of the model. No slots: cached properties need `__dict__`."""

    events: list[TapeEvent]
    """Forward and backward."""
    freed: list[TapeEvent]
    """Frees of what the backward pass leaves: gradients, and what FSDP holds."""
    moments: list[Moment]
    """In order of time; the last one is `END`, when everything is freed."""
    linears: tuple[tuple[str, int], ...]
    """Linear layers inside the decoder layers in order of their first call → elements of the weight on one rank."""
    detached: frozenset[str]
    """Linear layers of the first decoder layer whose input needs no gradient, as below the first adapter."""

    @cached_property
    def numbers(self) -> dict[Key, int]:
        """The number of each moment."""
        return {moment.key: number for number, moment in enumerate(self.moments)}

    @cached_property
    def totals(self) -> list[int]:
        """The peak of each moment, all parts together."""
        return [sum(moment.peak) for moment in self.moments]

    @cached_property
    def begins(self) -> list[int]:
        """The bytes at the beginning of each moment, all parts together."""
        return [sum(moment.begin) for moment in self.moments]

    def place_of(self, what: str) -> int:
        """Returns how many events come before the first mark of that name."""
        return next((moment.place for moment in self.moments if moment.key[0] == what), len(self.events))


class MarkedContext(Context):
    """Layer code's context that marks where linear layers begin and end."""

    __slots__ = ("_first", "_ledger", "sizes")

    def __init__(self, model: ModelFacts, variant: Variant, tape: Tape) -> None:
        super().__init__(model, variant, tape)
        self._ledger = tape.ledger
        self._first = ""
        self.sizes: dict[str, int] = {}

    def linear(self, x: Tensor, name: str, *, shards: str = "") -> Tensor:
        if name.startswith("model.") or name == "lm_head":
            return super().linear(x, name, shards=shards)
        shape = self.linears[name]
        self.sizes.setdefault(name, shape.outputs * shape.inputs // (self.variant.parallel.tp if shards else 1))
        if self.is_tiling:
            return super().linear(x, name, shards=shards)
        again = self.tape.is_recomputing
        if not again:
            self._first = self._first or name
            self._ledger.layer += name == self._first
        layer, direction = self._ledger.layer, "recompute" if again else "forward"
        self._ledger.enter(direction, layer, name)
        result = super().linear(self._marked(x, ("after", layer, name)), name, shards=shards)
        self._ledger.enter(f"{direction} end", layer, name)
        return self._marked(result, ("backward", layer, name))

    def _marked(self, x: Tensor, key: Key) -> Tensor:
        """Passes x through; marks the moment when its gradient comes back."""
        return ops.marked(self.tape, x, lambda: self._ledger.enter(*key))


EDGE = 3
"""Layers at each end of a kind that are written out as they were played. The first is unlike the others if its input
needs no gradient; the others are there because layers free what their neighbours made."""
BRIEF_EDGE = 2
"""Layers at each end if only peaks are needed: the first, and a typical one."""
RECORDINGS_KEPT = 24
"""Number of cached recordings; one is about a megabyte."""
BRIEF_RECORDINGS_KEPT = 256
"""The same of moments alone."""


Slice = tuple[str, int]
"""`f` or `b` for forward or backward, and the number of a period of layers; `before`, `between` and `after` have -1."""
Home = tuple[str, int, int]
"""The slice that allocates a tensor, and its position among the tensors of that slice."""

_Placed = tuple[int, Home, int]
"""An event: its place in the recording, the tensor, and its bytes or 0 for a free."""


def numbers_at_edges(depth: Mapping[str, int], *, period: int, edge: int) -> tuple[int, ...]:
    """Returns the layers within about `edge` of either end of their kind."""
    numbers: list[int] = []
    first, most = 0, _in_step(edge, period)
    for count in depth.values():
        numbers += [first + index for index in range(count) if index < most or index >= count - most]
        first += count
    return tuple(numbers)


def to_play(depth: Mapping[str, int], *, period: int, edge: int) -> dict[str, int]:
    """Returns how many layers of each kind are played: `edge` at either end, in step with the period."""
    least = 2 * _in_step(edge, period)
    return {kind: count if count <= least else least + (count - least) % period for kind, count in depth.items()}


def to_copy(depth: Mapping[str, int], played: Mapping[str, int], *, period: int, edge: int) -> dict[int, int]:
    """Returns how often the last period of the lower edge of each kind is repeated, by the period's number."""
    copies, first = {}, 0
    for kind, count in played.items():
        if depth[kind] > count:
            copies[-(-first // period) + _in_step(edge, period) // period - 1] = (depth[kind] - count) // period
        first += count
    return copies


def _in_step(edge: int, period: int) -> int:
    return -(-edge // period) * period


def repeated(short: Recording, copies: Mapping[int, int], *, period: int = 1) -> Recording | None:
    """Returns the recording with more `copies` of some periods of layers, or None if one differs from its neighbours.

    A slice of the recording reaches from the first linear of a period to the next period's, backward from the gradient
    of its output to the gradient before it. Each tensor is known by the slice that allocates it and its place there; a
    copy that frees a neighbour's tensor frees the one at the same place. Live bytes at a mark grow by the same amount
    from copy to copy.
    """
    cut = _Cut(short, period)
    if not all(cut.is_regular(number) for number in copies):
        return None
    return _Writer(short, cut, copies).write()


def moments_of(
    short: Recording, copies: Mapping[int, int], *, period: int, layers: Collection[int] | None = None
) -> list[Moment]:
    """Returns the moments of a recording without events, with more `copies`: of some layers or all, and between."""
    return _Writer(short, _Cut(short, period), copies, layers).write().moments


class _Cut:
    """A recording cut into slices."""

    def __init__(self, short: Recording, period: int) -> None:
        self.period = period
        self.order: list[Slice] = []
        self.start: dict[Slice, int] = {}
        self.moments: dict[Slice, list[Moment]] = {}
        self.home: dict[Hashable, Home] = {}
        self._find_slices(short)
        ends = [*(self.start[slice_] for slice_ in self.order[1:]), len(short.events)]
        self.events: dict[Slice, list[TapeEvent]] = {}
        for slice_, end in zip(self.order, ends, strict=True):
            self.events[slice_] = short.events[self.start[slice_] : end]
            made = (key for key, size in self.events[slice_] if size)
            for place, key in enumerate(made):
                self.home[key] = (*slice_, place)

    def _find_slices(self, short: Recording) -> None:
        self._open(("before", -1), 0)
        for moment in short.moments:
            what, layer, _ = moment.key
            position, number = moment.place, layer // self.period
            if what == "forward" and layer >= 0 and ("f", number) not in self.start:
                self._open(("f", number), position)
            elif what == "loss forward":
                self._open(("between", -1), position)
            elif what == "layer backward" and ("b", number) not in self.start:
                self._open(("b", number), position)
            elif what in ("vision backward", "embedding backward") and ("after", -1) not in self.start:
                self._open(("after", -1), position)
            self.moments[self.order[-1]].append(moment)

    def _open(self, slice_: Slice, position: int) -> None:
        self.order.append(slice_)
        self.start[slice_] = position
        self.moments[slice_] = []

    def is_regular(self, number: int) -> bool:
        """Returns whether a period of layers can be repeated.

        The next one must repeat its events, both neighbours allocate the same, and it frees only their tensors.
        """
        for direction in "fb":
            shape, following = (self._shape((direction, other)) for other in (number, number + 1))
            made = [self._made((direction, number + step)) for step in (-1, 0, 1)]
            if shape is None or shape != following or made[0] != made[1] or made[1] != made[2]:
                return False
            if any(len(event) == 3 and event[1] not in (-1, 0, 1, None) for event in shape):
                return False
        return True

    def placed(self, slice_: Slice) -> list[_Placed]:
        """Returns the events of a slice."""
        events = enumerate(self.events[slice_], self.start[slice_])
        return [(position, self.home[key], size) for position, (key, size) in events]

    def growth(self, slice_: Slice) -> tuple[int, ...]:
        """Returns how much more of each part lives a period of layers later."""
        direction, number = slice_
        pair = (number, number + 1) if direction == "f" else (number + 1, number)
        begins = [self.moments[direction, place][0].begin for place in pair]
        return tuple(after - before for before, after in zip(*begins, strict=True))

    def _made(self, slice_: Slice) -> list[int]:
        return [size for _, size in self.events.get(slice_, ()) if size]

    def _shape(self, slice_: Slice) -> list[tuple[object, ...]] | None:
        """Returns a slice; tensors of other slices are given by the distance of their slice."""
        if slice_ not in self.events:
            return None
        return [(size,) if size else self._relative(self.home[key], slice_[1]) for key, size in self.events[slice_]]

    def _relative(self, home: Home, number: int) -> tuple[object, ...]:
        direction, other, place = home
        return (direction, other - number if other >= 0 else None, place)


class _Writer:
    """Writes the longer recording, with the moments of all layers or of some."""

    def __init__(
        self, short: Recording, cut: _Cut, copies: Mapping[int, int], layers: Collection[int] | None = None
    ) -> None:
        self.short, self.cut, self.copies, self.layers = short, cut, copies, layers
        self.ids: dict[Home, int] = {}
        self.templates = {slice_: cut.placed(slice_) for slice_ in cut.order}
        self.events: list[TapeEvent] = []
        self.moments: list[Moment] = []
        self.grown = (0,) * len(Part)
        """Live bytes beyond the short recording's, by part."""

    def write(self) -> Recording:
        for slice_ in self.cut.order:
            first = self._moved(slice_[1])
            numbers = range(first, first + self.copies.get(slice_[1], 0) + 1)
            for number in numbers if slice_[0] == "f" else reversed(numbers):
                is_copy = number != numbers[0] if slice_[0] == "f" else number != numbers[-1]
                # each further copy begins with as much more as the played period has kept or, backward, given back
                if is_copy:
                    self.grown = tuple(map(add, self.grown, self.cut.growth(slice_)))
                if self._is_shown(number):
                    self._slice(slice_, number)
        return replace(self.short, events=self.events, freed=list(self._freed()), moments=self.moments)

    def _moved(self, number: int) -> int:
        """Returns the number of a period of layers in the longer recording."""
        return number + sum(count for repeated_, count in self.copies.items() if repeated_ < number)

    def _is_shown(self, number: int) -> bool:
        """Returns whether a period has a layer whose moments are written; outside of the layers it is -1."""
        period = self.cut.period
        return number < 0 or self.layers is None or any(number * period + at in self.layers for at in range(period))

    def _slice(self, slice_: Slice, number: int) -> None:
        """Writes a slice as number `number`."""
        if not self.short.events:
            self.moments += self._moments(slice_, number)
            return
        moments = iter(self._moments(slice_, number))
        moment = next(moments, None)
        # marks lie between events: one comes before the first event at its place
        for position, home, size in self.templates[slice_]:
            while moment is not None and moment.place <= position:
                self._put(moment)
                moment = next(moments, None)
            self.events.append((self._id(self._shifted(home, slice_, number)), size))
        if moment is not None:
            self._put(moment)
        for rest in moments:
            self._put(rest)

    def _put(self, moment: Moment) -> None:
        self.moments.append(moment if moment.place == len(self.events) else moment._replace(place=len(self.events)))

    def _moments(self, slice_: Slice, number: int) -> Iterator[Moment]:
        """Yields the moments of a slice as number `number`, at the places that they were played at."""
        period, layers, more = self.cut.period, self.layers, self.grown
        is_grown, first = any(more), number * period
        for moment in self.cut.moments[slice_]:
            (what, at, name), place, begin, peak = moment
            if moment.key == END:
                yield moment
                continue
            if at >= 0:
                at = first + at % period
                if number >= 0 and layers is not None and at not in layers:
                    continue
            if is_grown:
                # part by part: a search has a hundred thousand of these sums, and `map` takes twice as long
                begin = (begin[0] + more[0], begin[1] + more[1], begin[2] + more[2], begin[3] + more[3])
                peak = (peak[0] + more[0], peak[1] + more[1], peak[2] + more[2], peak[3] + more[3])
            yield Moment((what, at, name), place, begin, peak)

    def _shifted(self, home: Home, slice_: Slice, number: int) -> Home:
        """Returns the home of a tensor as a slice that stands for `number` means it."""
        direction, other, place = home
        if other < 0:
            return home
        if slice_[1] < 0 or abs(other - slice_[1]) > 1:  # no neighbour's, such as the logits, freed at the very end
            return (direction, self._moved(other), place)
        return (direction, number + other - slice_[1], place)

    def _id(self, home: Home) -> int:
        return self.ids.setdefault(home, len(self.ids))

    def _freed(self) -> Iterator[TapeEvent]:
        """Yields the final frees, a repeated period's once for every copy."""
        for key, _ in self.short.freed:
            direction, other, place = self.cut.home[key]
            for copy in range(self.copies.get(other, 0) + 1):
                yield self._id((direction, self._moved(other) + copy, place)), 0


@lru_cache(BRIEF_RECORDINGS_KEPT)
def brief(model: ModelFacts, variant: Variant, edge: int | None) -> Recording:
    """Returns the moments of some layers at each end of each kind, or of all, as at the whole depth; no events."""
    if model.traced is not None:
        return _traced(model, variant)
    depth, period = layer_kinds(model, variant), variant.checkpointing.period
    recording, short = _shallow(model, variant)
    copies = to_copy(depth, short, period=period, edge=_brief_edge(model, variant))
    layers = None if edge is None else frozenset(numbers_at_edges(depth, period=period, edge=edge))
    return replace(recording, moments=moments_of(recording, copies, period=period, layers=layers))


@lru_cache(BRIEF_RECORDINGS_KEPT)
def _shallow(model: ModelFacts, variant: Variant) -> tuple[Recording, dict[str, int]]:
    """Returns the moments of a few layers of each kind, whatever edges of the depth they stand for, and how many."""
    short = layer_kinds(model, variant)
    if not variant.kernels.router_loss:  # else each layer makes tensors there that no shallower model has
        short = to_play(short, period=variant.checkpointing.period, edge=_brief_edge(model, variant))
    played = _played(model, variant, short, all_tiles=False)
    moments = [moment._replace(place=0) for moment in played.moments]
    return replace(played, events=[], freed=[], moments=moments), short


def _brief_edge(model: ModelFacts, variant: Variant) -> int:
    """Returns the layers that are played at each end if only peaks are needed: more if image features follow the first
    ones, or if the inputs of the last ones are still on their way to RAM."""
    levels = max(1, vision.num_trained_levels(model, variant)) if variant.batch.image_patches else 0
    return BRIEF_EDGE + levels + variant.code.inputs_in_flight


_OF_FORWARD = ("vision forward", "embedding forward", "layer forward", "norm forward")
_BEFORE_LAYERS = ("forward", "loss forward", "loss backward", "head backward")
_AFTER_LAYERS = ("vision backward", "embedding backward")
"""Segments of a trace before and after the backward passes of the layers."""
_OF_LINEARS = ("recompute", "recompute end", "backward", "after")
"""Marks at linear layers in the backward pass of a decoder layer."""


def _traced(model: ModelFacts, variant: Variant) -> Recording:
    """Returns the moments of a model whose own code was traced: each segment has its peak from begin to end.

    Gradients of parameters are left to the engine.
    """
    assert model.traced is not None
    depth = model.num_hidden_layers
    found: dict[str, list[Peak]] = {}
    for peak in model.traced.profile.moments(
        num_layers=depth, micro_batch=variant.batch.rows, grad_ckpt=variant.checkpointing.enabled
    ):
        found.setdefault("forward" if peak.name in _OF_FORWARD else peak.name, []).append(peak)
    # the tracer saw no modules: each linear of the layer gathers at the peak of its layer's backward pass
    linears = tuple(
        (group.name.removesuffix(".weight"), group.numel)
        for group in shard(model, variant.parallel).tensors
        if group.is_linear and is_inside(group)
    )
    keys: list[tuple[Key, int, int]] = [((name, -1, ""), *_highest(found, name)) for name in _BEFORE_LAYERS]
    for layer, activations, logits in _layers_backward(found, depth):
        keys.append((("layer backward", layer, ""), activations, logits))
        keys += [((what, layer, name), activations, logits) for name, _ in reversed(linears) for what in _OF_LINEARS]
    keys += [((name, -1, ""), *_highest(found, name)) for name in _AFTER_LAYERS]
    peaks = [(activations, logits, 0, 0) for _, activations, logits in keys]
    moments = [Moment(key, 0, parts, parts) for (key, _, _), parts in zip(keys, peaks, strict=True) if any(parts)]
    nothing = (0,) * len(Part)
    return Recording([], [], [*moments, Moment(END, 0, nothing, nothing)], linears, frozenset())


def _highest(found: Mapping[str, list[Peak]], name: str) -> tuple[int, int]:
    """Returns activations and logits of the highest moment of a segment; 0 if a trace does not have it."""
    pairs = ((peak.activations, peak.logits) for peak in found.get(name, ()))
    return max(pairs, key=sum, default=(0, 0))


def _layers_backward(found: Mapping[str, list[Peak]], depth: int) -> Iterator[tuple[int, int, int]]:
    """Yields activations and logits in the backward pass of each layer, which follow a straight line.

    A trace has the highest moments of all layers: with the fewest gradients of parameters the last layer's, with the
    most the first one's, unless that is nowhere the highest; then it has no more than the embedding.
    """
    moments = sorted(found.get("layer backward", ()), key=lambda peak: peak.grads)
    if not moments:
        return
    last = moments[0].activations, moments[0].logits
    first = (moments[-1].activations, moments[-1].logits) if len(moments) > 1 else _highest(found, "embedding backward")
    for layer in reversed(range(depth)):
        share = (depth - 1 - layer) / max(1, depth - 1)
        activations, logits = (round(high + share * (low - high)) for high, low in zip(last, first, strict=True))
        yield layer, activations, logits


def run_at_edges(model: ModelFacts, variant: Variant, edge: int) -> tuple[int, ...]:
    """Returns the layers of which `brief` has moments."""
    return numbers_at_edges(layer_kinds(model, variant), period=variant.checkpointing.period, edge=edge)


@lru_cache(RECORDINGS_KEPT)
def record(model: ModelFacts, variant: Variant) -> Recording:
    """Returns a micro-batch at the whole depth of the model."""
    depth, period = layer_kinds(model, variant), variant.checkpointing.period
    short = to_play(depth, period=period, edge=EDGE * period)
    if short == depth or variant.kernels.router_loss:
        return _played(model, variant, depth)
    copies = to_copy(depth, short, period=period, edge=EDGE * period)
    recording = repeated(_played(model, variant, short), copies, period=period)
    if recording is not None and _is_sound(recording):
        return recording
    return _played(model, variant, depth)


def _is_sound(recording: Recording) -> bool:
    """Returns whether nothing is allocated twice: where tensors outlive their layer, layers do not repeat."""
    live: set[Hashable] = set()
    for key, size in recording.events:
        if size and key in live:
            return False
        (live.add if size else live.discard)(key)
    return True


def _played(model: ModelFacts, variant: Variant, depth: dict[str, int], *, all_tiles: bool = True) -> Recording:
    tape = Tape(release=variant.release, gathers=variant.gathers)
    tape.plays_all_tiles = all_tiles
    tape.offloads_inputs, tape.num_in_flight = variant.checkpointing.offload, variant.code.inputs_in_flight
    tape.stops_early = variant.stops_early
    tape.keeps_inputs = variant.keeps_inputs
    ledger, context = tape.ledger, MarkedContext(model, variant, tape)
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
