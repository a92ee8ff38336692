"""Replays the program of a micro-batch on each rank, and adds the engine's bytes to the tape's at every instant."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import add, attrgetter
from typing import NamedTuple

from dstrain.plan.memory.deepspeed.gradients import (
    PartitionedReducer,
    Reducer,
    ShardedReducer,
    WideReducer,
    layout,
)
from dstrain.plan.memory.deepspeed.modules import Modules
from dstrain.plan.memory.deepspeed.program import Event, MicroBatch, Program
from dstrain.plan.memory.deepspeed.settings import Settings
from dstrain.plan.memory.deepspeed.states import Resident
from dstrain.plan.memory.deepspeed.timeline import Block, Mark, Part, Parts, Span, Timeline, spans
from dstrain.plan.memory.deepspeed.zero3_gathering import Coordinator
from dstrain.plan.memory.layers.recording import Recording
from dstrain.plan.memory.layers.tape import END, Key
from dstrain.plan.memory.peak import Peak


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The engine's bytes on some ranks in the forward and backward passes of a step."""

    ranks: tuple[int, ...]
    """The ranks that may have the highest peak; the first rank comes first."""
    events: list[Block]
    """Allocations and frees on all of them; the rank of a block is its place in `ranks`."""
    micro_batches: tuple[tuple[Mark, ...], ...]
    """The moments of each micro-batch before which something happens; the last is the end."""
    spans: tuple[tuple[Span, ...], ...]
    """Bytes of each rank up to each of these moments, micro-batch by micro-batch."""
    kept: tuple[int, ...]
    """Bytes of gradient that remain for the step on each of the ranks."""


def replay(micro_batch: MicroBatch, settings: Settings, ranks: int) -> Replay:
    """Returns the replay of the ranks that may peak highest: first, last, and the one with the most gradient."""
    candidates = {0}
    if settings.zero.stage in (1, 2) and not settings.is_wide:
        elements = layout(micro_batch.modules, ranks).elements_by_rank(ranks)
        candidates |= {ranks - 1, elements.index(max(elements))}
    program = micro_batch if settings.zero.stage == 3 else micro_batch.gradients
    return _replay(program, settings.before_step(ranks), ranks, tuple(sorted(candidates)))


@cache
def _replay(program: Program, settings: Settings, num_ranks: int, ranks: tuple[int, ...]) -> Replay:
    """Replays some ranks."""
    timeline = Timeline()
    reducer = _reducer(program.modules, settings, num_ranks, ranks, timeline)
    is_gathering = settings.zero.stage == 3
    coordinator = Coordinator(program, settings, num_ranks, timeline) if is_gathering else None
    micro_batches = []
    for _ in range(settings.step.grad_accum):
        micro_batches.append(tuple(_micro_batch(program, timeline.events, reducer, coordinator)))
    places = [mark.place for mark in chain.from_iterable(micro_batches)]
    played = [spans(timeline.events, places, rank) for rank in range(len(ranks))]
    kept = tuple(at_end.before[Part.GRADS] for *_, at_end in played)
    return Replay(ranks, timeline.events, tuple(micro_batches), tuple(tuple(each[:-1]) for each in played), kept)


def _micro_batch(
    program: Program, events: list[Block], reducer: Reducer, coordinator: Coordinator | None
) -> Iterator[Mark]:
    """Plays a micro-batch; yields the moments before which there were `events`."""
    calls, place = _calls(reducer, coordinator), len(events)
    if coordinator:
        coordinator.reset()
    for event, number in program.events:
        call = calls[event]
        if call is not None:
            call(number)
        elif len(events) > place:
            place = len(events)
            yield Mark(program.marks[number], place)
    reducer.end()
    if coordinator:
        coordinator.leave()
    yield Mark(END, len(events))


def _calls(reducer: Reducer, coordinator: Coordinator | None) -> list[Callable[[int], None] | None]:
    """Returns the action of each event; none at a mark."""
    calls: list[Callable[[int], None] | None] = [None] * len(Event)
    calls[Event.GRAD] = reducer.grad
    if coordinator:
        calls[Event.FETCH], calls[Event.RELEASE] = coordinator.fetch, coordinator.release
        calls[Event.KEEP], calls[Event.DROP] = coordinator.keep, coordinator.drop
    return calls


def _reducer(
    modules: Modules, settings: Settings, num_ranks: int, ranks: tuple[int, ...], timeline: Timeline
) -> Reducer:
    if settings.zero.stage in (1, 2) and not settings.is_wide:
        return PartitionedReducer(modules, settings, num_ranks, timeline, ranks)
    plain = {0: Reducer, 1: WideReducer, 3: ShardedReducer}
    return plain[settings.zero.stage](modules, settings, num_ranks, timeline)


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
    replay: Replay
    """Forward and backward on the ranks that may have the highest peak."""
    spans: tuple[tuple[Span, ...], ...]
    """The replay's spans of each of these ranks, and the optimizer step as the last one."""
    first_rank_step: list[Block]
    """Allocations and frees of the step on the first of the ranks."""


class _Tape(NamedTuple):
    """The tape's bytes around the moments at which the engine acts in a step; it is empty at the last one, the
    optimizer step."""

    starts: list[int]
    """The number of the moment before."""
    ends: list[int]
    """The number of the moment."""
    begins: list[int]
    """Bytes at that moment."""
    tops: list[int]
    """Peak from the one to the other, while the engine holds the same."""


def highest(engine: Engine, recording: Recording, *, overlaps: bool) -> Peak:
    """Returns the highest peak: of the moments in which the engine holds the same, the highest is looked at alone.

    Where communication overlaps, its streams share no free blocks with computation, so that the allocator holds the
    peak of each: `apart` is what these are more together, on the first rank, whose allocations are replayed.
    """
    tape = _tape_at(recording, engine.replay)
    tops = [_top(tape, *_sums(engine, rank)) for rank in range(len(engine.spans))]
    most = max(total for total, _ in tops)
    rank, at = next((rank, at) for rank, (total, at) in enumerate(tops) if total == most)
    instants = _instants_at(recording, tape, at, engine.spans[rank][at])
    peak = _peak_of(max(instants, key=attrgetter("total")), engine.resident)
    if not overlaps:
        return peak
    computing, _ = _top(tape, *_computing(engine))
    return replace(peak, apart=max(0, computing + _aside(engine.replay) - most))


def _tape_at(recording: Recording, replay: Replay) -> _Tape:
    starts: list[int] = []
    ends: list[int] = []
    for marks in replay.micro_batches:
        reached = list(places(recording.numbers, marks))
        starts += [0, *reached[:-1]]
        ends += reached
    last = len(recording.moments) - 1
    starts.append(last)
    ends.append(last)
    totals, begins = recording.totals, recording.begins
    tops = [max(totals[start:end]) if start < end else _NEVER for start, end in zip(starts, ends, strict=True)]
    return _Tape(starts, ends, [begins[end] for end in ends], tops)


def _top(tape: _Tape, before: list[int], high: list[int]) -> tuple[int, int]:
    """Returns the peak with the engine's bytes `before` it acts and while it does, and the number of the first mark up
    to which it is reached."""
    every = list(map(add, tape.begins, high)), list(map(add, tape.tops, before))
    top = max(map(max, every))
    return top, min(totals.index(top) for totals in every if top in totals)


@cache
def _sums(engine: Engine, rank: int) -> tuple[list[int], list[int]]:
    """Returns a rank's bytes before and during each span, all parts together."""
    return [sum(span.before) for span in engine.spans[rank]], [sum(span.high) for span in engine.spans[rank]]


@cache
def _computing(engine: Engine) -> tuple[list[int], list[int]]:
    """Returns the same on the first rank in the stream of computation, from which gradients come, and all of the
    optimizer step."""
    *passes, (_, step) = engine.spans[0]
    before = [span.before[Part.GRADS] for span in passes]
    high = [span.high[Part.GRADS] for span in passes]
    return [*before, 0], [*high, step[Part.GRADS] + step[Part.BUFFERS]]


@cache
def _aside(replay: Replay) -> int:
    """Returns the bytes of the streams that reduce and gather, at the peak of each; gathered blocks in flight count."""
    live = gathered = 0
    leaving: deque[int] = deque(maxlen=IN_FLIGHT)
    for _, part, size, _ in replay.events:
        if part is Part.GATHERED:
            live += size
            if size > 0:
                gathered = max(gathered, live + sum(leaving))
            else:
                leaving.append(-size)
    return gathered + max(span.high[Part.BUFFERS] for span in replay.spans[0])


def instants_of(engine: Engine, recording: Recording) -> Iterator[Instant]:
    """Yields the moments of a step on all ranks that were played."""
    tape = _tape_at(recording, engine.replay)
    for of_rank in engine.spans:
        for at, span in enumerate(of_rank):
            yield from _instants_at(recording, tape, at, span)


def _instants_at(recording: Recording, tape: _Tape, at: int, span: Span) -> Iterator[Instant]:
    """Yields the moments up to the one at whose beginning the engine acts."""
    now = sum(span.before)
    for moment in recording.moments[tape.starts[at] : tape.ends[at]]:
        yield Instant(sum(moment.peak) + now, moment.key, moment.peak, span.before)
    key, _, begin, _ = recording.moments[tape.ends[at]]
    is_step = at == len(tape.ends) - 1
    yield Instant(sum(begin) + sum(span.high), STEP if is_step else key, begin, span.high)


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


def places(numbers: Mapping[Key, int], marks: Iterable[Mark]) -> Iterator[int]:
    """Yields the number of the tape's moment at each mark; of one that the tape does not have, the last before it."""
    number = 0
    for key, _ in marks:
        found = numbers.get(key, number)
        if found > number:
            number = found
        yield number
