"""Live tensors at the marks of a few layers of a deep model, from a recording of a shallow one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import NamedTuple

from dstrain.plan.memory.layers.recording import Moment


class _Place(NamedTuple):
    """A layer of the deep model, as the shallow one's layer stands for it."""

    played: int
    """The layer that was played."""
    number: int
    """The layer for which it stands."""
    kept: tuple[int, ...]
    """Bytes kept in it beyond the layer that was played, by part."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The moments of a recording: around the layers, and of each layer forward and backward."""

    outside: dict[str, list[Moment]]
    forward: dict[int, list[Moment]]
    backward: dict[int, list[Moment]]


def moments_at_edges(
    moments: list[Moment], depth: Mapping[str, int], played: Mapping[str, int], *, period: int, edge: int
) -> list[Moment]:
    """Returns the moments of the layers within about `edge` of either end of their kind, as at the whole `depth`.

    `moments` belong to a model with the `played` layers: of each kind as many at either end, in step with the
    `period` of recomputed ones. Layers between them keep as much as their neighbours.
    """
    parts = _parts(moments)
    places = list(_places(parts, depth, played, period, edge))
    last = places[-1].kept
    return [
        *parts.outside["before"],
        *chain.from_iterable(_moved(parts.forward[place.played], place) for place in places),
        *_moved(parts.outside["between"], _Place(-1, -1, last)),
        *chain.from_iterable(_moved(parts.backward[place.played], place) for place in reversed(places)),
        *parts.outside["after"],
    ]


def only_layers(moments: list[Moment], numbers: Sequence[int]) -> list[Moment]:
    """Returns the moments outside of the layers and of some layers."""
    parts = _parts(moments)
    return [
        *parts.outside["before"],
        *chain.from_iterable(parts.forward[number] for number in numbers),
        *parts.outside["between"],
        *chain.from_iterable(parts.backward[number] for number in reversed(numbers)),
        *parts.outside["after"],
    ]


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


def _in_step(edge: int, period: int) -> int:
    return -(-edge // period) * period


def _parts(moments: list[Moment]) -> _Parts:
    outside: dict[str, list[Moment]] = {"before": [], "between": [], "after": []}
    forward: dict[int, list[Moment]] = defaultdict(list)
    backward: dict[int, list[Moment]] = defaultdict(list)
    current = outside["before"]
    for moment in moments:
        what, layer, _ = moment.key
        if what == "forward" and layer >= 0:
            current = forward[layer]
        elif what in ("head forward", "loss forward"):
            current = outside["between"]
        elif what == "layer backward":
            current = backward[layer]
        elif what in ("vision backward", "embedding backward", "backward end"):
            current = outside["after"]
        current.append(moment)
    return _Parts(outside, forward, backward)


def _places(
    parts: _Parts, depth: Mapping[str, int], played: Mapping[str, int], period: int, edge: int
) -> Iterator[_Place]:
    first = number = 0
    kept: tuple[int, ...] = (0,) * len(parts.outside["before"][0].begin)
    for kind, count in played.items():
        missing = (depth[kind] - count) // period
        half = count // 2 // period * period
        low = [_Place(first + index, number + index, kept) for index in range(half)]
        growth = _growth(parts, first + half, period) if missing else kept
        shift, grown = missing * period, _plus(kept, growth, missing)
        high = [_Place(first + index, number + shift + index, grown) for index in range(half, count)]
        copies = min(max(0, -(-(edge - half) // period)), missing)
        yield from low
        for copy in range(1, copies + 1):
            yield from (_copy(place, copy * period, growth, copy) for place in low[-period:])
        for copy in range(min(copies, missing - copies), 0, -1):
            yield from (_copy(place, -copy * period, growth, -copy) for place in high[:period])
        yield from high
        first, number, kept = first + count, number + depth[kind], grown


def _copy(place: _Place, layers: int, growth: tuple[int, ...], times: int) -> _Place:
    return _Place(place.played, place.number + layers, _plus(place.kept, growth, times))


def _growth(parts: _Parts, layer: int, period: int) -> tuple[int, ...]:
    """Returns the bytes that a period of layers before this one keeps."""
    later, earlier = (parts.forward[number][0].begin for number in (layer, layer - period))
    return tuple(after - before for after, before in zip(later, earlier, strict=True))


def _plus(base: tuple[int, ...], growth: tuple[int, ...], times: int) -> tuple[int, ...]:
    return tuple(one + times * other for one, other in zip(base, growth, strict=True))


def _moved(moments: list[Moment], place: _Place) -> list[Moment]:
    if not any(place.kept) and place.number == place.played:
        return moments
    kept, number = place.kept, place.number
    return [
        Moment(
            (what, number if layer >= 0 else layer, name), 0, tuple(map(add, begin, kept)), tuple(map(add, peak, kept))
        )
        for (what, layer, name), _, begin, peak in moments
    ]
