"""Extends a recording of a few layers to the full depth by repeating one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from dstrain.plan.memory.deepspeed.moments import Key
from dstrain.plan.memory.traces.recording import Recording, TapeEvent

Slice = tuple[str, int]
"""`f` or `b` for forward or backward, and the layer; `before`, `between` and `after` have layer -1."""
Home = tuple[str, int, int]
"""The slice in which a tensor is allocated, and the how many-th of that slice it is."""


def repeated(short: Recording, layer: int, more: int, *, is_terse: bool) -> Recording | None:
    """Returns the recording with `layer` repeated `more` times, or None where it is unlike its neighbours.

    A slice of the recording reaches from the first linear of a layer to that of the next, backward from the gradient of
    a layer's output to that of the one before it. Each tensor is known by the slice that allocates it and its place
    there; what a copy frees of a neighbour is the neighbour's tensor at the same place.
    """
    cut = _Cut(short)
    if not cut.is_regular(layer):
        return None
    return _Writer(short, cut, layer, more, is_terse).write()


class _Cut:
    """A recording in slices."""

    def __init__(self, short: Recording) -> None:
        self.order: list[Slice] = []
        self.start: dict[Slice, int] = {}
        self.marks: dict[Slice, list[tuple[int, Key]]] = {}
        self.home: dict[Hashable, Home] = {}
        self._find_slices(short)
        ends = [*(self.start[each] for each in self.order[1:]), len(short.events)]
        self.events: dict[Slice, list[TapeEvent]] = {}
        for each, end in zip(self.order, ends, strict=True):
            self.events[each] = short.events[self.start[each] : end]
            made = (key for key, size in self.events[each] if size)
            for place, key in enumerate(made):
                self.home[key] = (*each, place)

    def _find_slices(self, short: Recording) -> None:
        self._open(("before", -1), 0)
        for position, key in short.marks:
            what, layer, _ = key
            if what == "forward" and layer >= 0 and ("f", layer) not in self.start:
                self._open(("f", layer), position)
            elif what == "loss forward":
                self._open(("between", -1), position)
            elif what == "layer backward":
                self._open(("b", layer), position)
            elif what == "embedding backward":
                self._open(("after", -1), position)
            self.marks[self.order[-1]].append((position - self.start[self.order[-1]], key))

    def _open(self, each: Slice, position: int) -> None:
        self.order.append(each)
        self.start[each] = position
        self.marks[each] = []

    def is_regular(self, layer: int) -> bool:
        """Returns whether a layer can be repeated.

        The next one must do just the same, both neighbours allocate the same, and neither free what is further away.
        """
        for direction in "fb":
            shape, following = (self._shape((direction, each)) for each in (layer, layer + 1))
            made = [self._made((direction, layer + step)) for step in (-1, 0, 1)]
            if shape is None or shape != following or made[0] != made[1] or made[1] != made[2]:
                return False
            if any(len(each) == 3 and each[1] not in (-1, 0, 1, None) for each in shape):
                return False
        return True

    def _made(self, each: Slice) -> list[int]:
        return [size for _, size in self.events.get(each, ()) if size]

    def _shape(self, each: Slice) -> list[tuple[object, ...]] | None:
        """Returns a slice with tensors of other slices by how far those are."""
        if each not in self.events:
            return None
        return [(size,) if size else self._relative(self.home[key], each[1]) for key, size in self.events[each]]

    def _relative(self, home: Home, layer: int) -> tuple[object, ...]:
        direction, other, place = home
        return (direction, other - layer if other >= 0 else None, place)


class _Writer:
    """Writes the longer recording."""

    def __init__(self, short: Recording, cut: _Cut, layer: int, more: int, is_terse: bool) -> None:
        self.short, self.cut, self.layer, self.more, self.is_terse = short, cut, layer, more, is_terse
        self.ids: dict[Home, int] = {}
        self.events: list[TapeEvent] = []
        self.marks: list[tuple[int, Key]] = []

    def write(self) -> Recording:
        for each in self.cut.order:
            if each[1] == self.layer and each[0] == "f":
                for copy in range(self.more + 1):
                    self._slice(each, self.layer + copy)
            elif each[1] == self.layer:
                for copy in reversed(range(self.more + 1)):
                    self._slice(each, self.layer + copy)
            else:
                self._slice(each, self._moved(each[1]))
        return Recording(self.events, self.marks, list(self._freed()))

    def _moved(self, layer: int) -> int:
        return layer + self.more if layer > self.layer else layer

    def _slice(self, each: Slice, layer: int) -> None:
        """Writes a slice as that of `layer`; a copy without what it gives back itself."""
        template = self.cut.events[each]
        is_copy = self.is_terse and each[1] == self.layer != layer
        own = {key for key, size in template if not size and self.cut.home[key][:2] == each} if is_copy else set()
        marks = iter(self.cut.marks[each])
        mark = next(marks, None)
        for position, (key, size) in enumerate(template):
            while mark is not None and mark[0] == position:
                self._mark(mark[1], layer)
                mark = next(marks, None)
            if key not in own:
                self.events.append((self._id(self._shifted(self.cut.home[key], each, layer)), size))
        while mark is not None:
            self._mark(mark[1], layer)
            mark = next(marks, None)

    def _mark(self, key: Key, layer: int) -> None:
        what, at, name = key
        self.marks.append((len(self.events), (what, layer if at >= 0 else at, name)))

    def _shifted(self, home: Home, each: Slice, layer: int) -> Home:
        """Returns the home of a tensor as a slice that stands for `layer` means it."""
        direction, other, place = home
        if other < 0:
            return home
        if each[1] < 0:
            return (direction, self._moved(other), place)
        return (direction, layer + other - each[1], place)

    def _id(self, home: Home) -> int:
        return self.ids.setdefault(home, len(self.ids))

    def _freed(self) -> Iterator[TapeEvent]:
        """Yields the frees at the end, those of the repeated layer for every copy."""
        for key, _ in self.short.freed:
            direction, other, place = self.cut.home[key]
            copies = range(self.more + 1) if other == self.layer else (0,)
            for copy in copies:
                yield self._id((direction, self._moved(other) + copy, place)), 0
