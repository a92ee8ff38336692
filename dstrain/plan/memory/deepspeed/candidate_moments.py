"""Selects, for each moment of the tape, the layers that can hold the peak.

The tape plays three layers of each kind; what is live at a moment grows by the same bytes from layer to layer. So of
the layers in the middle only those matter that are on the upper hull of the engine's bytes over the layers, whatever a
layer keeps. That makes adding up a plan a matter of some hundred sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dstrain.plan.memory.deepspeed.byte_account import Parts
from dstrain.plan.memory.deepspeed.moments import Key, Kinds
from dstrain.plan.memory.deepspeed.program import Program
from dstrain.plan.memory.deepspeed.replay import Replay

Candidate = tuple[int, int, Parts]
"""Layers by which the tape is short at this one, the engine's bytes, and those by part."""


@dataclass(frozen=True, slots=True, eq=False)
class CandidateMoments:
    """Everything that the engine does in a step, as far as it can matter."""

    at: dict[Key, tuple[tuple[Candidate, ...], tuple[Candidate, ...]]]
    """A moment of the tape → what the engine may have when it begins, and after that."""
    end: tuple[Candidate, ...]
    """The same after the backward pass."""


def slots(program: Program, kinds: Kinds, left_out: int) -> tuple[tuple[Key, int], ...]:
    """Returns for each mark the moment of the tape that it is, and by how many layers the tape is short there.

    The program may have left out so many layers in the middle of the last kind.
    """
    place: dict[int, tuple[int, int]] = {-1: (-1, 0)}
    first = start = 0
    for index, (_, depth, count) in enumerate(kinds):
        missing = left_out if index == len(kinds) - 1 else 0
        for inside in range(depth - missing):
            layer = inside if inside < (depth - missing) // 2 else inside + missing
            if depth == count or layer == 0:
                place[first + inside] = (start + layer, 0)
            elif layer == depth - 1:
                place[first + inside] = (start + count - 1, depth - count)
            else:
                place[first + inside] = (start + count - 2, layer - (count - 2))
        first, start = first + depth - missing, start + count
    return tuple(((what, place[layer][0], name), place[layer][1]) for what, layer, name in program.marks)


def course(replays: Iterable[Replay], marks: tuple[tuple[Key, int], ...]) -> CandidateMoments:
    """Returns the levels of all ranks and micro-batches, moment by moment."""
    begins: dict[Key, list[Candidate]] = {key: [] for key, _ in marks}
    afters: dict[Key, list[Candidate]] = {key: [] for key, _ in marks}
    end: list[Candidate] = []
    for replay in replays:
        for levels in replay.micro_steps:
            for (key, short), level in zip(marks, levels, strict=False):
                begins[key].append((short, level.high_total, level.high))
                afters[key].append((short, level.after_total, level.after))
            end.append((0, levels[-1].high_total, levels[-1].high))
    return CandidateMoments({key: (_hull(found), _hull(afters[key])) for key, found in begins.items()}, _hull(end))


def _hull(found: list[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates that are largest for some growth ≥ 0 from layer to layer."""
    best: list[Candidate] = []
    for candidate in sorted(found, key=lambda each: each[:2], reverse=True):
        if best and candidate[1] <= best[-1][1]:
            continue
        while len(best) > 1 and _is_below(best[-2], best[-1], candidate):
            best.pop()
        best.append(candidate)
    return tuple(best)


def _is_below(left: Candidate, middle: Candidate, right: Candidate) -> bool:
    """Returns whether the middle one lies on or under the line between the others."""
    return (middle[1] - left[1]) * (left[0] - right[0]) <= (right[1] - left[1]) * (left[0] - middle[0])
