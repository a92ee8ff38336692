"""Allocations and frees of a run of DeepSpeed on one rank: the engine's, and the tape's between them.

Gathered parameters come from the stream of all-gathers, and what a reduction makes from its own, where communication
overlaps; a block that computation has used can be given away again when the GPU has got past it.

Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module; partition_parameters.py:
free_param; stage3.py: reduce_and_partition_stream; stage_1_and_2.py: reduction_stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
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
from dstrain.plan.memory.traces.event_writer import MAIN, REDUCE, UNSHARD, Script

STREAMS = {Part.GRADS: MAIN, Part.BUFFERS: REDUCE, Part.GATHERED: UNSHARD}
"""The streams that allocate if communication overlaps."""
ENGINE_IDS = -(1 << 40)
"""First id of the engine's blocks, which are written once for all micro-batches on the tape."""
LOADED = 1 << 40
"""The id of the parameters as the model was loaded with them."""
REPLAYS_KEPT = 4
"""Replays whose events are kept; those of one are a few megabytes."""


def steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int
) -> Iterator[list[Event]]:
    """Yields the events of the first rank before the first step, then those of each step.

    ZeRO-1 and 2 flatten the parameters that the model was loaded with, which leave their place to what comes later.
    """
    engine, recording = engine_of(model, configuration, num_ranks), recorded(model, configuration)
    script, between = Script(), engine.resident
    if between.flat:
        script.events.append((LOADED, between.flat))
    script.allocate(between.params)
    script.free(LOADED)
    script.allocate_all((between.optimizer - between.late, between.grads, between.buffers, between.gathered))
    script.allocate(workspace_bytes)
    yield script.take()
    first = _step(script, engine, recording, workspace_bytes, overlaps=configuration.zero.overlap_comm)
    yield first
    passing = {event[0] for event in first if not event[1]}
    yield from repeat([event for event in first if event[0] in passing])


def _step(script: Script, engine: Engine, recording: Recording, workspace_bytes: int, *, overlaps: bool) -> list[Event]:
    """Returns the events of the first step; all but a workspace and the optimizer states go with it."""
    replay = engine.replays[0]
    micro_batches, last = _written(replay, overlaps)
    for actions, written in zip(replay.micro_batches, micro_batches, strict=True):
        _write(script, recording, actions, written, workspace_bytes)
        workspace_bytes = 0
    _write_step(script, engine, replay.kept)
    script.events += last
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
    script = Script(ENGINE_IDS)
    blocks, micro_batches = _Blocks(script, STREAMS if overlaps else {}), []
    for actions in replay.micro_batches:
        micro_batches.append([blocks.written(action) for action in actions])
    blocks.close()
    return micro_batches, script.take()


class _Blocks:
    """The engine's live blocks."""

    def __init__(self, script: Script, streams: dict[Part, int]) -> None:
        self._script, self._streams = script, streams
        self._live: dict[tuple[Part, int], list[int]] = defaultdict(list)
        self._leaving: list[int] = []

    def written(self, action: Action) -> list[Event]:
        """Returns the allocations and frees of an action."""
        for event in action.events:
            self._write(event)
        return self._script.take()

    def _write(self, event: EngineEvent) -> None:
        part, size = event
        if size > 0:
            if part is Part.GATHERED and len(self._leaving) > IN_FLIGHT:
                self._forget(IN_FLIGHT)
            self._live[event].append(self._script.allocate(size, self._streams.get(part, MAIN)))
        elif size:
            same = self._live.get((part, -size))
            if same:
                self._free(part, same.pop(0))
            else:
                self._remove(part, -size)

    def _remove(self, part: Part, size: int) -> None:
        """Frees several blocks that make up a size, or a part of one."""
        while size:
            largest = size if self._live.get((part, size)) else self._largest(part, size)
            if not largest:
                self._split(part, size)
                return
            self._free(part, self._live[part, largest].pop(0))
            size -= largest

    def _largest(self, part: Part, size: int) -> int:
        """Returns the size of the largest block of up to `size`, or 0 if none exists."""
        sizes = (block for (kind, block), keys in self._live.items() if kind is part and keys and block <= size)
        return max(sizes, default=0)

    def _split(self, part: Part, size: int) -> None:
        """Takes a part of a block that was allocated as one; the rest becomes another block."""
        whole = min(block for (kind, block), keys in self._live.items() if kind is part and keys)
        self._free(part, self._live[part, whole].pop(0))
        self._live[part, whole - size].append(self._script.allocate(whole - size, self._streams.get(part, MAIN)))

    def _free(self, part: Part, key: int) -> None:
        if part is Part.GATHERED:
            self._leaving.append(key)
        else:
            self._script.free(key)

    def _forget(self, count: int) -> None:
        while len(self._leaving) > count:
            self._script.free(self._leaving.pop(0))

    def close(self) -> None:
        """Frees everything."""
        self._forget(0)
        for keys in self._live.values():
            self._script.free(*keys)
            keys.clear()
