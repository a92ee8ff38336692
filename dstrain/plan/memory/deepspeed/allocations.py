"""Allocations and frees of a run of DeepSpeed on one rank: the engine's, and the tape's between them.

Gathered parameters come from the stream of all-gathers, and what a reduction makes from its own, where communication
overlaps; a block that computation has used can then be given away again when the GPU has got past it.

Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module; partition_parameters.py:
free_param; stage3.py: reduce_and_partition_stream; stage_1_and_2.py: reduction_stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import repeat

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Event
from dstrain.plan.memory.deepspeed.byte_account import Action, EngineEvent, Part
from dstrain.plan.memory.deepspeed.engine import engine_of, recorded
from dstrain.plan.memory.deepspeed.instants import IN_FLIGHT, Engine, places
from dstrain.plan.memory.deepspeed.replay import Replay
from dstrain.plan.memory.layers.recording import Recording

MAIN, UNSHARD, REDUCE = range(3)
"""Streams: where the model computes, where ZeRO-3 gathers, where gradients are reduced."""
STREAMS = {Part.GRADS: MAIN, Part.BUFFERS: REDUCE, Part.GATHERED: UNSHARD}
"""The streams that allocate if communication overlaps."""
ENGINE_IDS = -(1 << 40)
"""First id of the engine's blocks, which are written once for all micro-batches on the tape."""
LOADED = 1 << 40
"""The id of the parameters as the model was loaded with them."""
REPLAYS_KEPT = 4
"""Number of replays whose events are kept, a few megabytes each."""


class Script:
    """Writes events; an id is what `allocate` returns."""

    def __init__(self, first_id: int = -1) -> None:
        self.events: list[Event] = []
        self._next = first_id

    def allocate(self, size: float, stream: int = MAIN) -> int:
        """Allocates; ids are negative, unlike a recording's."""
        key, self._next = self._next, self._next - 1
        nbytes = round(size)
        if nbytes:
            self.events.append((key, nbytes, stream) if stream else (key, nbytes))
        return key

    def free(self, *keys: int) -> None:
        """Frees, in this order."""
        self.events += [(key, 0) for key in keys]

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        taken, self.events = self.events, []
        return taken

    def allocate_all(self, sizes: Iterable[float], stream: int = MAIN) -> list[int]:
        """Allocates each size in order."""
        return [self.allocate(size, stream) for size in sizes]


def steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int
) -> Iterator[list[Event]]:
    """Yields the events of the first rank before the first step, then of each step.

    ZeRO-1 and 2 flatten the parameters that the model was loaded with, which leave their place to what comes later.
    """
    engine, recording = engine_of(model, configuration, num_ranks), recorded(model, configuration)
    script, between = Script(), engine.resident
    if between.flat:
        script.events.append((LOADED, between.flat))
    script.allocate(between.params)
    script.free(LOADED)
    script.allocate_all((between.optimizer - between.late, between.grads, between.buffers))
    persistent = script.allocate(between.gathered)
    script.allocate(workspace_bytes)
    yield script.take()
    first = _step(script, engine, recording, workspace_bytes, persistent, overlaps=configuration.zero.overlap_comm)
    yield first
    passing = {event[0] for event in first if not event[1]}
    yield from repeat([event for event in first if event[0] in passing])


def _step(
    script: Script,
    engine: Engine,
    recording: Recording,
    workspace_bytes: int,
    persistent: int,
    *,
    overlaps: bool,
) -> list[Event]:
    """Returns the events of the first step; all but a workspace and the optimizer states go with it.

    ZeRO-3's persistent parameters are released for the optimizer step, and come back under the same id.
    """
    replay, gathered = engine.replays[0], engine.resident.gathered
    micro_batches, last = _written(replay, overlaps)
    for actions, events in zip(replay.micro_batches, micro_batches, strict=True):
        _write(script, recording, actions, events, workspace_bytes)
        workspace_bytes = 0
    script.free(persistent)
    _write_step(script, engine, replay.kept)
    script.events += [*last, (persistent, gathered)] if gathered else last
    return script.take()


def _write_step(script: Script, engine: Engine, kept: int) -> None:
    """Writes the optimizer step: blocks that the next instant has not go, then it gets its others."""
    held: list[tuple[int, int]] = []
    late = engine.resident.late
    for grads, buffers, states in engine.first_rank_step:
        sizes = [max(0, grads - kept), *buffers]
        before, held = held, []
        for size, key in before:
            if size in sizes:
                sizes.remove(size)
                held.append((size, key))
            else:
                script.free(key)
        held += [(size, script.allocate(size)) for size in sizes]
        for size in states:
            script.allocate(min(size, late))
            late -= min(size, late)
    script.free(*(key for _, key in held))


def _write(
    script: Script,
    recording: Recording,
    actions: tuple[Action, ...],
    written: list[list[Event]],
    workspace_bytes: int,
) -> None:
    """Writes a micro-batch; the thread that goes backward has a workspace of its own, from its first product on."""
    start, head = 0, recording.place_of("head backward")
    for number, events in zip(places(recording.numbers, actions), written, strict=True):
        end = recording.moments[number].place
        script.events += recording.events[start:end]
        if start <= head < end:
            script.allocate(workspace_bytes)
        script.events += events
        start = end
    script.events += recording.freed


@lru_cache(REPLAYS_KEPT)
def _written(replay: Replay, overlaps: bool) -> tuple[list[list[list[Event]]], list[Event]]:
    """Returns the events of the engine at each of its actions, micro-batch by micro-batch; and the frees of what is
    left."""
    streams, in_flight = (STREAMS, IN_FLIGHT) if overlaps else ({}, 0)
    left: dict[int, None] = {}
    leaving: deque[int] = deque()

    def written(block: EngineEvent) -> Iterator[Event]:
        number, part, size = block
        key = ENGINE_IDS - number
        if size > 0:
            left[key] = None
            yield key, size, streams.get(part, MAIN)
            return
        if part is Part.GATHERED:
            leaving.append(key)
            if len(leaving) <= in_flight:
                return
            key = leaving.popleft()
        del left[key]
        yield key, 0

    micro_batches = [
        [[event for block in action.events for event in written(block)] for action in actions]
        for actions in replay.micro_batches
    ]
    return micro_batches, [(key, 0) for key in left]
