"""Allocations and frees of a run of DeepSpeed on one rank: the engine's, and the tape's between them.

Gathered parameters come from the stream of all-gathers, and what a reduction makes from its own, where communication
overlaps; a block that computation has used can then be given away again when the GPU has got past it.

Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py: fetch_sub_module; partition_parameters.py:
free_param; stage3.py: reduce_and_partition_stream; stage_1_and_2.py: reduction_stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.caching_allocator import Event
from dstrain.plan.memory.deepspeed.engine import engine_of, recorded
from dstrain.plan.memory.deepspeed.replay import IN_FLIGHT, Engine, Replay, places
from dstrain.plan.memory.deepspeed.timeline import Block, Mark, Part
from dstrain.plan.memory.layers.recording import Recording

MAIN, UNSHARD, REDUCE = range(3)
"""Streams: where the model computes, where ZeRO-3 gathers, where gradients are reduced."""
STREAMS = {Part.GRADS: MAIN, Part.BUFFERS: REDUCE, Part.GATHERED: UNSHARD}
"""The streams that allocate if communication overlaps."""
ENGINE_IDS = -(1 << 40)
"""First id of the engine's blocks, which are written once for all micro-batches on the tape."""
STEP_IDS = 2 * ENGINE_IDS
"""The same of the optimizer step."""
LOADED = 1 << 40
"""The id of the parameters as the model was loaded with them."""
PARAMS, OPTIMIZER, GRADS, BUFFERS, PERSISTENT, WORKSPACE, WORKSPACE_BACK = range(-7, 0)
"""Ids of the resident states, and of the workspaces of both threads that compute; the tape's are not negative."""
REPLAYS_KEPT = 4
"""Number of replays whose events are kept, a few megabytes each."""


def steps(
    model: ModelFacts, configuration: Configuration, num_ranks: int, workspace_bytes: int
) -> Iterator[list[Event]]:
    """Yields the events of the first rank before the first step, then of each step.

    ZeRO-1 and 2 flatten the parameters that the model was loaded with, which leave their place to what comes later.
    """
    engine, recording = engine_of(model, configuration, num_ranks), recorded(model, configuration)
    between = engine.resident
    # a block without bytes is the free of one that does not exist, which changes nothing
    yield [
        (LOADED, between.flat),
        (PARAMS, between.params),
        (LOADED, 0),
        (OPTIMIZER, between.optimizer - between.late),
        (GRADS, between.grads),
        (BUFFERS, between.buffers),
        (PERSISTENT, between.gathered),
        (WORKSPACE, workspace_bytes),
    ]
    first = _step(engine, recording, workspace_bytes, overlaps=configuration.zero.overlap_comm)
    yield first
    passing = {event[0] for event in first if not event[1]}
    yield from repeat([event for event in first if event[0] in passing])


def _step(engine: Engine, recording: Recording, workspace_bytes: int, *, overlaps: bool) -> list[Event]:
    """Returns the events of the first step; all but a workspace and the optimizer states go with it.

    ZeRO-3's persistent parameters are released for the optimizer step, and come back under the same id.
    """
    events: list[Event] = []
    micro_batches, left = _written(engine.replay, overlaps)
    for marks, written in zip(engine.replay.micro_batches, micro_batches, strict=True):
        events += _micro_batch(recording, marks, written, workspace_bytes)
        workspace_bytes = 0
    events.append((PERSISTENT, 0))
    events += [(STEP_IDS - number, max(0, size)) for number, _, size, _ in engine.first_rank_step]
    return [*events, *left, (PERSISTENT, engine.resident.gathered)]


def _micro_batch(
    recording: Recording, marks: tuple[Mark, ...], written: list[list[Event]], workspace_bytes: int
) -> Iterator[Event]:
    """Yields the events of a micro-batch; the thread that goes backward has a workspace of its own, from its first
    product on."""
    start, head = 0, recording.place_of("head backward")
    for number, events in zip(places(recording.numbers, marks), written, strict=True):
        end = recording.moments[number].place
        yield from recording.events[start:end]
        if workspace_bytes and start <= head < end:
            yield WORKSPACE_BACK, workspace_bytes
        yield from events
        start = end
    yield from recording.freed


@lru_cache(REPLAYS_KEPT)
def _written(replay: Replay, overlaps: bool) -> tuple[list[list[list[Event]]], list[Event]]:
    """Returns the engine's events up to each of the marks of the micro-batches; and the frees of what is left."""
    streams, in_flight = (STREAMS, IN_FLIGHT) if overlaps else ({}, 0)
    left: dict[int, None] = {}
    leaving: deque[int] = deque()

    def written(block: Block) -> Iterator[Event]:
        number, part, size, _ = block
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

    micro_batches: list[list[list[Event]]] = []
    start = 0
    for marks in replay.micro_batches:
        micro_batches.append([])
        for _, end in marks:
            blocks = [block for block in replay.events[start:end] if not block[3]]  # the first rank's
            micro_batches[-1].append([event for block in blocks for event in written(block)])
            start = end
    return micro_batches, [(key, 0) for key in left]
