"""The allocations and frees of one micro-batch on the tape, and what lives at every mark between them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.memory.layers import ops
from dstrain.plan.memory.layers.context import Context, Variant
from dstrain.plan.memory.layers.graph import Tape
from dstrain.plan.memory.layers.tensor import Ledger, Part, Tensor

TapeEvent = tuple[Hashable, int]
"""An allocation `(id, bytes)` or a free `(id, 0)`, on the main stream."""
Key = tuple[str, int, str]
"""Phase (`forward`, `forward end`, `recompute`, `recompute end`, `backward`, `after`), its layer (-1: outside of the
layers) and the module; or an instant of the tape with layer and an empty name."""
END: Key = ("backward end", -1, "")
"""The mark after the backward pass."""


class Moment(NamedTuple):
    """The time from one mark to the next, in bytes by part of the tape."""

    key: Key
    """The mark."""
    place: int
    """Events of the recording before the mark."""
    begin: tuple[int, ...]
    """Live bytes at the mark."""
    peak: tuple[int, ...]
    """Peak of live bytes until the next mark."""


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

    def renamed(self) -> Recording:
        """Returns the recording with other ids, so that what another leaves may still be there."""
        events: list[TapeEvent] = [(("again", key), size) for key, size in self.events]
        freed: list[TapeEvent] = [(("again", key), size) for key, size in self.freed]
        return replace(self, events=events, freed=freed)


class MarkedLedger(Ledger):
    """A ledger that remembers every allocation and free, and every mark with what was live."""

    __slots__ = ("layer", "marks")

    def __init__(self) -> None:
        super().__init__(record=True)
        self.layer = -1
        """The current decoder layer."""
        self.marks: list[tuple[Key, int, tuple[int, ...]]] = []

    def enter(self, instant: str | Key) -> None:
        assert self.events is not None
        key = instant if isinstance(instant, tuple) else _key_of(instant)
        if key[0] == "layer backward":
            self.layer = key[1]
        self.marks.append((key, len(self.events), tuple(self.parts)))
        super().enter(str(len(self.marks) - 1))

    def moments(self) -> list[Moment]:
        """Returns the live bytes, mark by mark, and none at the end."""
        assert self.events is not None
        nothing = (0,) * len(Part)
        return [
            *(Moment(*mark, self.peaks[str(index)]) for index, mark in enumerate(self.marks)),
            Moment(END, len(self.events), nothing, nothing),
        ]

    def take(self) -> list[TapeEvent]:
        """Returns the events so far and starts a new list."""
        assert self.events is not None
        taken, self.events = self.events, []
        return [*taken]


def _key_of(instant: str) -> Key:
    name, _, number = instant.rpartition(" ")
    if name.startswith("vision "):  # a block of the tower, outside of the layers
        return (name, -1, number)
    return (name, int(number), "") if number.isdigit() else (instant, -1, "")


class MarkedContext(Context):
    """Layer code's context that marks where linear layers begin and end."""

    __slots__ = ("_first", "_ledger", "sizes")

    def __init__(self, model: ModelFacts, variant: Variant, tape: Tape, ledger: MarkedLedger) -> None:
        super().__init__(model, variant, tape)
        self._ledger = ledger
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
        self._ledger.enter((direction, layer, name))
        result = super().linear(self._marked(x, ("after", layer, name)), name, shards=shards)
        self._ledger.enter((f"{direction} end", layer, name))
        return self._marked(result, ("backward", layer, name))

    def _marked(self, x: Tensor, key: Key) -> Tensor:
        """Passes x through; marks the moment when its gradient comes back."""
        return ops.marked(self.tape, x, lambda: self._ledger.enter(key))
