"""Extends a recording of a few layers to the full depth by repeating one of them, or one period of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from operator import add

from dstrain.plan.memory.layers.recording import END, Moment, Recording, TapeEvent
from dstrain.plan.memory.layers.tensor import Part

Slice = tuple[str, int]
"""`f` or `b` for forward or backward, and the number of a period of layers; `before`, `between` and `after` have -1."""
Home = tuple[str, int, int]
"""The slice that allocates a tensor, and its position among the tensors of that slice."""

_Placed = tuple[int, Home, int]
"""An event: its place in the recording, the tensor, and its bytes or 0 for a free."""


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
        """Returns how much more of each part lives when the next slice begins."""
        following = self.order[self.order.index(slice_) + 1]
        begins = [self.moments[key][0].begin for key in (slice_, following)]
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
    """Writes the longer recording."""

    def __init__(self, short: Recording, cut: _Cut, copies: Mapping[int, int]) -> None:
        self.short, self.cut, self.copies = short, cut, copies
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
                if is_copy:
                    self.grown = tuple(map(add, self.grown, self.cut.growth(slice_)))
                self._slice(slice_, number)
        return replace(self.short, events=self.events, freed=list(self._freed()), moments=self.moments)

    def _moved(self, number: int) -> int:
        """Returns the number of a period of layers in the longer recording."""
        return number + sum(count for repeated_, count in self.copies.items() if repeated_ < number)

    def _slice(self, slice_: Slice, number: int) -> None:
        """Writes a slice as number `number`."""
        moments = iter(self.cut.moments[slice_])
        moment = next(moments, None)
        for position, home, size in self.templates[slice_]:
            while moment is not None and moment.place <= position:
                self._moment(moment, number)
                moment = next(moments, None)
            self.events.append((self._id(self._shifted(home, slice_, number)), size))
        while moment is not None:
            self._moment(moment, number)
            moment = next(moments, None)

    def _moment(self, moment: Moment, number: int) -> None:
        what, at, name = key = moment.key
        if key == END:
            self.moments.append(moment._replace(place=len(self.events)))
            return
        begin, peak = (tuple(map(add, parts, self.grown)) for parts in (moment.begin, moment.peak))
        period = self.cut.period
        at = number * period + at % period if at >= 0 else at
        self.moments.append(Moment((what, at, name), len(self.events), begin, peak))

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
