"""The allocations and frees of one micro-batch in order, with marks where the engine acts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dstrain.plan.memory.deepspeed import moments
from dstrain.plan.memory.deepspeed.moments import Key
from dstrain.plan.memory.layers.tensor import Ledger

TapeEvent = tuple[Hashable, int]
"""An allocation `(id, bytes)` or a free `(id, 0)`, on the main stream."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One micro-batch."""

    events: list[TapeEvent]
    """Forward and backward."""
    marks: list[tuple[int, Key]]
    """How many events came before, and what begins."""
    freed: list[TapeEvent]
    """Frees of what the backward pass leaves: gradients, and what FSDP holds."""

    def place_of(self, what: str) -> int:
        """Returns how many events come before the first mark of that name."""
        return next((place for place, key in self.marks if key[0] == what), len(self.events))

    def renamed(self) -> Recording:
        """Returns the recording with other ids, so that what another leaves may still be there."""
        events: list[TapeEvent] = [(("again", key), size) for key, size in self.events]
        return Recording(events, self.marks, [(("again", key), size) for key, size in self.freed])


class MarkedEvents(moments.Marks):
    """A ledger for the context of `engine.moments`: it remembers events, and what began between them."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        Ledger.__init__(self, record=True)
        self.places: list[tuple[int, Key]] = []
        """How many events came before, and what began then."""

    def enter(self, instant: str | Key) -> None:
        assert self.events is not None
        key = instant if isinstance(instant, tuple) else moments.key_of(instant)
        self.places.append((len(self.events), key))

    def take(self) -> list[TapeEvent]:
        """Returns the events so far, and begins anew."""
        assert self.events is not None
        taken, self.events = self.events, []
        return [*taken]
