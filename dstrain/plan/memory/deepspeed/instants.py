"""Live bytes of the instants of a step: the tape's, and what the engine holds between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from dstrain.plan.memory.deepspeed.byte_account import Action, Part, Parts
from dstrain.plan.memory.deepspeed.optimizer_step import StepInstant
from dstrain.plan.memory.deepspeed.replay import Replay
from dstrain.plan.memory.deepspeed.resident import Resident
from dstrain.plan.memory.layers.recording import Key, Recording
from dstrain.plan.memory.peak import Peak

STEP: Key = ("optimizer step", -1, "")
"""The time after the last micro-batch."""
IN_FLIGHT = 2
"""Gathered blocks given back that computation has yet to get past. The host waits only for gathers, of which two may be
under way, so that it may run further ahead; nothing has been measured. Source: deepspeed 0.19.8
runtime/zero/partitioned_param_coordinator.py: __max_ongoing_fetch_events."""


_NEVER = -(1 << 60)

NAMES = {
    "forward": "forward",
    "forward end": "forward",
    "head forward": "forward",
    "loss forward": "loss forward",
    "router loss forward": "loss forward",
    "loss backward": "loss backward",
    "head backward": "head backward",
    "vision forward": "forward",
    "vision forward end": "forward",
    "vision backward": "vision backward",
    "embedding backward": "embedding backward",
    "backward end": "gradient reduction",
    "optimizer step": "optimizer step",
}
"""Names of moments; all others belong to the backward pass of a layer."""


class Instant(NamedTuple):
    """Live bytes of one moment beyond the resident ones."""

    total: int
    """All parts together."""
    key: Key
    """The moment."""
    tape: tuple[int, ...]
    """The tape's bytes: activations, logits, gradients just made, nothing gathered."""
    engine: Parts
    """The engine's: gradients, buffers, gathered."""

    @property
    def name(self) -> str:
        """Name of the moment."""
        return NAMES.get(self.key[0], "layer backward")


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The engine's bytes for a model, whatever the micro-batch."""

    resident: Resident
    """Bytes held between steps."""
    replays: tuple[Replay, ...]
    """Forward and backward on the ranks that may have the highest peak; the first rank comes first."""
    steps: tuple[tuple[Parts, ...], ...]
    """Bytes at the instants of the optimizer step, on the same ranks."""
    first_rank_step: tuple[StepInstant, ...]
    """The blocks of these instants on the first of the ranks."""


_Span = tuple[int, int, Parts, Parts, bool]
"""The first of some moments in which the engine holds the same, and the one at whose beginning it acts; what it holds
till then, and the most while it acts; and whether that is the optimizer's step."""


class _Level(NamedTuple):
    """Bytes of the engine until it acts, and the peak while it acts."""

    before: Parts
    high: Parts
    before_total: int
    high_total: int
    before_grads: int
    high_grads: int


def highest(engine: Engine, recording: Recording, *, overlaps: bool) -> Peak:
    """Returns the highest peak: of the moments in which the engine holds the same, the highest is looked at alone.

    Where communication overlaps, its streams share no free blocks with computation, so that the allocator holds the
    peak of each: `apart` is what these are more together, on the first rank, whose allocations are replayed.
    """
    totals, begins, last = recording.totals, recording.begins, len(recording.moments) - 1
    top, most, streams = None, -1, 0
    for replay, step in zip(engine.replays, engine.steps, strict=True):
        main = 0
        for actions, levels in zip(replay.micro_batches, _levels(replay), strict=True):
            start = 0
            for end, level in zip(places(recording.numbers, actions), levels, strict=True):
                before, high, before_total, high_total, before_grads, high_grads = level
                begin, tape = begins[end], max(totals[start:end]) if start < end else _NEVER
                main = max(main, begin + high_grads, tape + before_grads)
                total = max(begin + high_total, tape + before_total)
                if total > most:
                    top, most = (start, end, before, high, False), total
                start = end
        for parts in step:
            main = max(main, begins[last] + parts[Part.GRADS] + parts[Part.BUFFERS])
            if begins[last] + sum(parts) > most:
                top, most = (last, last, parts, parts, True), begins[last] + sum(parts)
        if overlaps and replay is engine.replays[0]:
            streams = main + _aside(replay)
    assert top is not None, "a step has moments"
    peak = _peak_of(max(_instants_of(top, recording), key=attrgetter("total")), engine.resident)
    return replace(peak, apart=max(0, streams - most))


@cache
def _levels(replay: Replay) -> tuple[tuple[_Level, ...], ...]:
    """Returns the engine's bytes around its actions, micro-batch by micro-batch."""
    before: Parts = (0, 0, 0)
    micro_batches = []
    for actions in replay.micro_batches:
        befores = [before, *(action.after for action in actions)]
        before = befores.pop()
        pairs = zip(befores, actions, strict=True)
        levels = ((held, high, sum(held), sum(high), held[0], high[0]) for held, (_, _, high, _) in pairs)
        micro_batches.append(tuple(map(_Level._make, levels)))
    return tuple(micro_batches)


@cache
def _aside(replay: Replay) -> int:
    """Returns the bytes of the streams that reduce and gather, at the peak of each; gathered blocks in flight count."""
    buffers = live = gathered = 0
    leaving: deque[int] = deque(maxlen=IN_FLIGHT)
    for action in chain.from_iterable(replay.micro_batches):
        buffers = max(buffers, action.high[Part.BUFFERS])
        for _, part, size in action.events:
            if part is Part.GATHERED:
                live += size
                if size > 0:
                    gathered = max(gathered, live + sum(leaving))
                else:
                    leaving.append(-size)
    return buffers + gathered


def instants_of(engine: Engine, recording: Recording) -> Iterator[Instant]:
    """Yields the moments of a step on all ranks that were played."""
    for replay, step in zip(engine.replays, engine.steps, strict=True):
        for span in _spans(replay, step, recording):
            yield from _instants_of(span, recording)


def _peak_of(top: Instant, between: Resident) -> Peak:
    grads, buffers, gathered = top.engine
    activations, logits, made, _ = top.tape
    return Peak(
        name=top.name,
        params=between.params,
        grads=between.grads + made + grads,
        optimizer=between.optimizer,
        buffers=between.buffers + buffers,
        gathered=between.gathered + gathered,
        activations=activations,
        logits=logits,
    )


def _spans(replay: Replay, step: tuple[Parts, ...], recording: Recording) -> Iterator[_Span]:
    """Yields the forward and backward passes of a step, then the optimizer's part, for which the tape is empty."""
    last = len(recording.moments) - 1
    before: Parts = (0, 0, 0)
    for actions in replay.micro_batches:
        start = 0
        for action, end in zip(actions, places(recording.numbers, actions), strict=True):
            yield start, end, before, action.high, False
            start, before = end, action.after
    for parts in step:
        yield last, last, parts, parts, True


def _instants_of(span: _Span, recording: Recording) -> Iterator[Instant]:
    start, end, before, high, is_step = span
    now = sum(before)
    for moment in recording.moments[start:end]:
        yield Instant(sum(moment.peak) + now, moment.key, moment.peak, before)
    key, _, begin, _ = recording.moments[end]
    yield Instant(sum(begin) + sum(high), STEP if is_step else key, begin, high)


def places(numbers: Mapping[Key, int], actions: Iterable[Action]) -> Iterator[int]:
    """Yields the number of the moment at whose beginning each action happens."""
    number = 0
    for action in actions:
        found = numbers.get(action.key, number)
        if found > number:
            number = found
        yield number
